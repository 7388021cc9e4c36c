"""P01, P02: planning (exit code 3)."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
    Code(
        "P0101", "`{target}: {constraint}` needs {needed} ranks, but there are {ranks}",
        "tp * pp * dp of a layout is the number of ranks of the models that share them: all ranks, or those of "
        "`devices`. Where dp is left open, tp * pp must divide that number.",
    ),
    Code(
        "P0102", "`{target}` cannot be cut by tp={tp}, pp={pp}: {reason}",
        "Tensor parallelism cuts heads, key/value heads and the inner width of a layer evenly; pipeline parallelism "
        "needs a layer for each stage.",
        "choose degrees that divide the model's sizes",
    ),
    Code(
        "P0103", "`{target}: devices({devices})` does not fit into the {ranks} ranks: {reason}",
        "A model with `devices(N)`, and the models that `colocate` ties to it, get N ranks for themselves, in order of "
        "declaration. All other models share the ranks that are left.",
    ),
    Code(
        "P0104", "`{target}` has no engine `{engine}`",
        "Training and scoring run on Megatron-core, generation on the project's own sampler or on vLLM.",
        "there is: {engines}",
    ),
    Code(
        "P0105", "`{target}` constrains a stage that `{model}` does not have",
        "A trained model has the stage `train`, which also scores; a frozen one has `forward`; a policy that generates "
        "has `generate`.",
        "`{model}` has: {stages}",
    ),
    Code(
        "P0106", "{ranks} ranks do not fit on the cluster's {devices} devices",
        "On a described cluster a rank is a device.",
        "plan for at most {devices} ranks, or describe a larger cluster",
    ),
    Code(
        "P0107", "the cluster file cannot be used: {reason}",
        "A cluster file is TOML with `nodes`, `devices_per_node`, a `device` (a name of the catalogue such as "
        "`a100-80gb`, or a table of `tflops`, `memory_gb`, `memory_gb_per_s`) and a table `links` (`intra_gb_per_s`, `inter_gb_per_s`, `latency_us`).", status=2,
    ),
    Code(
        "P0108", "`{target}` disagrees with `{other}`: {what}",
        "A trained model scores with the weights where it trains, so both stages have one layout; models that share "
        "ranks have one number of them; one number of micro-batch or degree cannot be given twice.",
        "leave one of the two out",
    ),
    Code(
        "P0109", "`--ranks {ranks}` is not a number of ranks",
        "A plan has at least one rank.", "give 1 or more", status=2,
    ),
    Code(
        "P0110", "the plan cannot be written: {reason}",
        "The plan file is written beside its place and renamed.", "give another place with `-o`", status=2,
    ),
    Code(
        "P0111", "{what} is not executed yet",
        "The language and `rlflowc eval` know this form, the engines do not. A run without it would be another algorithm.",
        "evaluate its equations on given numbers with `rlflowc eval`",
    ),
    Code(
        "P0112", "there is no model `{model}` in the catalogue",
        "Planning for a described cluster needs the sizes of a model, not its weights. `catalog:NAME` takes them from the "
        "catalogue of published shapes.",
    ),
    Code(
        "P0113", "`{model}` does not fit on cluster {cluster}: it needs {least:.1f} GB on each device, there are {usable:.1f}",
        "The need is that of the layout with the least memory over all of the cluster's devices, with layers computed "
        "again in backward, one sample at a time, and the optimizer's states in the host's memory while idle.",
        "{enough}",
    ),
    Code(
        "P0114", "the models do not fit together on cluster {cluster}: at best {least:.1f} GB on each device, there are "
        "{usable:.1f}",
        "Each model would fit alone, but neither on shared devices nor on devices of its own is there room for all, or "
        "`plan:` gives them more devices than there are.",
        "{enough}",
    ),
    Code(
        "P0115", "`{model}` has no layout on cluster {cluster} as `plan:` asks for",
        "Degrees multiply to the devices of a set, which are whole nodes or a part that divides one; tp divides heads, "
        "key/value heads and inner width and stays in a node, pp divides the layers.",
        "leave a degree of `{model}` open, or ask for others",
    ),
    Code(
        "P0116", "{ranks} ranks are no number of whole nodes of cluster {cluster}, which have {each} devices each",
        "On a described cluster a plan takes whole nodes, or a part of a single one.",
        "take {less} ranks (`--ranks {less}`)",
    ),
    Code(
        "P0117", "`{target}` takes no `{item}`",
        "Recomputation and the optimizer's states are of a trained model; `sequence_parallel` and `chunks` cut a model that "
        "trains or scores. Generation runs with a cache and one stage.",
        "say it of a model's stage {stages}, or leave it out", status=3,
    ),
    Code(
        "P0118", "`{target}: devices({devices})` is no number of devices that a set of models can have on cluster {cluster}",
        "On a described cluster a set of models has whole nodes, or a part of a node that divides it.",
        "take {near}",
    ),
    Code(
        "P0119", "`{target}: reshard({strategy})` has nobody to gather with",
        "The strategies gather among ranks that train and generate. Where generation has ranks of its own, those hold "
        "nothing of the weights, so what they need comes point to point, from one rank that has it.",
        "leave it out, or write `reshard(minimal)`",
    ),
    Code(
        "P0201", "this is no plan that can be run: {reason}",
        "A plan is the JSON that `rlflowc compile` writes. A file that was cut short or edited by hand is refused, "
        "with the place inside it.",
        "compile the program again", status=2,
    ),
    Code(
        "P0202", "the plan does not hold together: {reason}",
        "Before a plan is written or run, it is checked: every value is made before its use, each weight arrives "
        "exactly once, degrees divide what they cut, and all ranks walk the same steps.",
        "compile the program again; if that does not help, this is a bug in rlflow",
    ),
    Code(
        "P0203", "the plan was changed after it was written",
        "A plan file holds the SHA-256 of its content. Steps, layouts and expressions hang together, so that a file "
        "changed by hand, by a merge or on its way here is refused, even where the change would make sense.",
        "compile the program again; what a plan decides is asked for in `plan:`, in `run:` or with `-s`", status=2,
    ),
    Code(
        "P0301", "nothing in the plan is called `{name}`",
        "`--why` takes the name of a model, a layout such as `actor.train`, a value, or a step as `rlflowc explain` "
        "prints it.", status=2,
    ),
    Code(
        "P0204", "the plan does not fit cluster {cluster}: {reason}",
        "On a described cluster a rank is a device. What models keep and what the largest call needs is estimated, with "
        "a part of the memory left for the rest.",
        "plan for this cluster: `rlflowc compile PROGRAM --cluster FILE`",
    ),
    Code(
        "P0302", "the plan was made for another cluster than {cluster}",
        "A plan holds the digest of the cluster that it was made for: its nodes decide which ranks share one.",
        "give the cluster of the plan with `--cluster`, or compile the program again for {cluster}",
    ),
    Code(
        "P0303", "nothing was measured in this run: {reason}",
        "A run writes the seconds of its steps into `trace.jsonl`, a line for each iteration.",
        "give the folder of a run that finished an iteration, such as `runs/ppo-20260101-120000`", status=2,
    ),
)
