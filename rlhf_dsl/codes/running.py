"""R01: running: data, models, ranks (exit code 4)."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
    Code(
        "R0130", "there is no model folder `{folder}`",
        "A model's source is a local folder as transformers writes it: `config.json` and safetensors.",
        "give a folder that holds a `config.json`, e.g. `-s base=FOLDER`", status=2,
    ),
    Code(
        "R0131", "the model's config cannot be read: {reason}",
        "`config.json` must be JSON with the sizes of the model under the names that transformers gives them.",
        "write the folder again with `save_pretrained`", status=2,
    ),
    Code(
        "R0132", "{what} is not supported",
        "The engines compute Llama-like models; a setting that they would silently ignore is refused.",
        "take a model of the families llama, qwen2, qwen3 or mistral whose config has no such setting", status=2,
    ),
    Code(
        "R0133", "the model folder holds no weights",
        "Weights are `model.safetensors`, or shards named by `model.safetensors.index.json`.",
        "convert them with `save_pretrained(folder, safe_serialization=True)`", status=2,
    ),
    Code(
        "R0134", "the weights cannot be read: {reason}",
        "A safetensors file or its index is damaged, or a file that the index names is missing.",
        "fetch or write the folder again", status=2,
    ),
    Code(
        "R0135", "tensor `{tensor}` is missing",
        "The config describes a tensor that no file of the folder holds.",
        "the weights belong to another config; fetch or write the folder again", status=2,
    ),
    Code(
        "R0136", "tensor `{tensor}` has shape {found}, the config says {expected}",
        "The config and the weights describe models of different sizes.",
        "the weights belong to another config; fetch or write the folder again", status=2,
    ),
    Code(
        "R0137", "tensor `{tensor}` is in no layer that the config describes",
        "A folder whose layers hold more than its config says is of another model, and would compute something else.",
        "the weights belong to another config; fetch or write the folder again", status=2,
    ),
    Code(
        "R0138", "vLLM does not generate with `{folder}`: {reason}",
        "vLLM refused the model or its settings: it may not have its family, the width of its heads, or memory for its context.",
        "generate with the project's own sampler: leave out `engine(vllm)`", status=2,
    ),
    Code(
        "R0139", "`{target}: engine(vllm)` needs vLLM, which is not installed",
        "vLLM brings many packages, so it is installed when it is asked for.",
        "install it with `make vllm`, or leave out `engine(vllm)`", status=2,
    ),
    Code(
        "R0110", "there is no `mpiexec`",
        "Ranks are started by Open MPI, which the package installs as a wheel beside Python.",
        "install the package with its dependencies, or put an Open MPI `mpiexec` on the PATH", status=2,
    ),
    Code(
        "R0111", "{ranks} ranks are too many for {cores} processor cores",
        "A rank is a process with a model in it. On one machine a few ranks share a core, which is slow but right; a number "
        "far beyond that exhausts the memory.",
        "start at most {most} ranks here (`--ranks`), or run the plan on more machines with `mpiexec` or `srun`", status=2,
    ),
    Code(
        "R0112", "there is nothing to run",
        "A run makes `steps` iterations, or as many as `epochs` takes, and evaluates the `eval` sections. The program has "
        "none of them.",
        "say how long: a section `run:` with `steps = 100`, or `-s run.steps=100`", status=2,
    ),
    Code(
        "R0150", "`{name}` is {value}",
        "A metric, a state or an objective came out infinite or not a number. Training on would spoil the models, so the run ends.",
        "look at what it is made of: a division by something that can be 0, an `exp` of something large, or a learning rate too high",
    ),
    Code(
        "R0151", "the gradient of `{model}` is not finite",
        "The gradient norm came out infinite or not a number. A step would spoil the weights, so the run ends before it.",
        "lower the learning rate, or look at the objective: an `exp` of something large, or a division by something that can be 0",
    ),
    Code(
        "R0152", "the plan is for {wanted} ranks, {started} are started",
        "A plan places models on a fixed number of ranks.",
        "start {wanted} ranks, or compile again with `--ranks {started}`", status=2,
    ),
    Code(
        "R0153", "rank {rank} died of {signal} in iteration {iteration}, at `{step}`",
        "A rank of the job ended without a word of its own: it was killed, or the machine ran out of memory. All ranks were ended.",
        "if nobody killed it, memory may have run out: see the system's log, use smaller micro-batches, or more ranks",
    ),
    Code(
        "R0154", "rank {rank} failed in iteration {iteration}, at `{step}`: {kind}: {text}",
        "An error that the runtime did not expect. This is a bug in rlflow, or in an engine below it.",
        "this is a bug in rlflow; `-v` shows the trace, which belongs into a report",
    ),
    Code(
        "R0155", "the ranks ended with exit code {code}; they said: {output}",
        "The job ended before any rank could say why, as when MPI cannot start.",
        "the logs of the ranks may say more",
    ),
    Code(
        "R0156", "`{option}` does not apply to a plan",
        "A plan was compiled with its settings; they cannot change without compiling again.",
        "give the program instead of the plan, or compile it again with the option", status=2,
    ),
    Code(
        "R0157", "the run folder holds a run already",
        "A run never writes over another one.",
        "give another `--run-dir`, or remove it", status=2,
    ),
    Code(
        "R0158", "the run folder cannot be written: {reason}",
        "A run writes its plan, metrics, logs and checkpoints into its folder.",
        "give another `--run-dir`", status=2,
    ),
    Code(
        "R0159", "`{name}` is {value} {place_in_value}",
        "The answer of `rlflowc eval` holds no infinity and no NaN: one that comes up is reported where it does.",
        "look at what it is made of: a division by something that can be 0, a `log` of 0, or an `exp` of something large", status=2,
    ),
    Code(
        "R0160", "the gradient of `{model}` by `{call}`{where} is {gradient}, finite differences give {difference}",
        "`--check-grad` moves each fed number a little either way, evaluates the objective as written again, and compares the "
        "slope with the gradient that training takes. At kinks and jumps any slope between those of both sides is right.",
        "step {step} trains with another gradient than that of its equation: a bug in rlflow; report program and feed",
        status=1,
    ),
    Code(
        "R0161", "the feed cannot be read: {reason}",
        "A feed is a JSON object in a file, `rlflow.feed/1`: numbers in place of what models, data and Python ops give.",
        "see the language reference for the parts of a feed", status=2,
    ),
    Code(
        "R0162", "the feed does not fit the program: {reason}",
        "Each response needs its lengths, and each call that the program makes its numbers, in the sizes of the program's dims.",
        "calls are named as `rlflowc fmt` prints them, e.g. `actor.logprobs(y)`", status=2,
    ),
    Code(
        "R0163", "this cannot be written: {reason}",
        "Metrics are appended line by line, checkpoints are written beside their place and renamed: what is there is whole.",
        "make room, or give another `--run-dir`; the checkpoints that were saved before are whole",
    ),
    Code(
        "R0165", "the checkpoint is damaged: {reason}",
        "A checkpoint holds a SHA-256 of each of its files, and is used only if all of them are as they were written.",
        "take the folder away, so that the one before it is used", status=2,
    ),
    Code(
        "R0166", "there is nothing to go on with: {reason}",
        "`rlflowc resume` takes the folder of a run that has saved: by `save` in `run:`, by Ctrl-C, or by SIGTERM or SIGUSR1.",
        "give a folder such as `runs/ppo-20260101-120000`", status=2,
    ),
    Code(
        "R0167", "this machine cannot be measured: {reason}",
        "`rlflowc profile` starts ranks that time products, memory, links and layers of a model; one of them has failed.",
        "measure the layers of a smaller model (`--model`), or with fewer ranks (`--ranks`)",
    ),
    Code(
        "R0168", "there is no place for what leaves the device: {reason}",
        "A plan may keep a model in the host's memory while others work. Where the device is a CPU, that is a file in the run "
        "folder, as large as the model with its gradients and the optimizer's states.",
        "make room there, or give another `--run-dir`",
    ),
    Code(
        "R0169", "on a CPU, vLLM keeps the memory of `{layout}`, which the plan offloads",
        "A plan may keep a model in the host's memory while others work. vLLM gives its memory up on a GPU alone, where it can "
        "sleep.",
        "generate with the project's own sampler: leave out `engine(vllm)`", status=2,
    ),
)
