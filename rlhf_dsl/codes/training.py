"""E04: training."""

from rlhf_dsl.codes.code import Code
from rlhf_dsl.codes.example import rolled, updated

_GOOD = updated("train actor to maximize mean(actor.logprobs(y) * r)")

CODES: tuple[Code, ...] = (
    Code(
        "E0401", "`{name}` is frozen and cannot be trained",
        "A model is frozen unless its declaration names an optimizer.",
        "write `trained by adamw(lr=1e-5)` at the end of its declaration",
        updated("train reward to maximize mean(reward.score(y))"), _GOOD,
    ),
    Code(
        "E0402", "two `train` lines for `{name}` in one update",
        "A model takes one step for a mini-batch, along the gradient of one objective.",
        "add the objectives in one line, or write a second `update`",
        updated("train actor to maximize mean(actor.logprobs(y) * r)",
        "train actor to minimize mean(actor.entropy(y))"),
        updated("train actor to maximize mean(actor.logprobs(y) * r) - mean(actor.entropy(y))"),
    ),
    Code(
        "E0403", "an objective is a number, this is `{type}`",
        "What is maximized or minimized is one number. How tokens, samples and rows are weighed is the choice of the "
        "reduction: `mean(x)` weighs tokens equally, `mean(mean[t](x))` responses.",
        "reduce it: `mean(...)`", updated("train actor to maximize actor.logprobs(y) * r"), _GOOD,
    ),
    Code(
        "E0404", "no gradient reaches `{name}`: {reached}",
        "Everything bound in `rollout` is a constant of the update; an objective differentiates into what models give "
        "in the update itself. `stop`, comparisons, counts, `sign`, `argmax` and `rank` let no gradient pass.",
        "use an output of `{name}` here, such as `{name}.{output}(y)`",
        updated("train actor to maximize mean(r)"), _GOOD,
    ),
    Code(
        "E0405", "`{name}` in an update",
        "Responses are made in `rollout`; an update computes with them again and again.",
        "move the line to `rollout`", updated("z[b, t] = actor.generate(q)",
        "train actor to maximize mean(actor.logprobs(z))"), _GOOD,
    ),
    Code(
        "E0406", "{minibatches} mini-batches do not divide `{dim}`, which is {size}",
        "Each mini-batch of an update takes an equal part of every root dim that the update reads.",
        "choose a divisor of {size}",
        updated("train actor to maximize mean(actor.logprobs(y))", head="update(minibatches=3):"),
        updated("train actor to maximize mean(actor.logprobs(y))", head="update(minibatches=2):"),
    ),
    Code(
        "E0407", "the next value of `{name}` needs itself: {path}",
        "The new values of states are computed once an iteration, in an order in which each is known before it is "
        "used. The value of this iteration, `{name}`, may always be used.",
        "use `{name}` instead of `next({name})` in one of them",
        "state x = 0.0 then next(z) + 1\nstate z = 0.0 then next(x) + 1",
        "state x = 0.0 then z + 1\nstate z = 0.0 then next(x) + 1",
    ),
    Code(
        "E0408", "`next({name})` has no value here: {reason}",
        "The new value of a state is computed from what `keep` left, so that it is known below the last `keep`. An "
        "evaluation changes nothing.",
        "move the line below the last `keep`, or use `{name}`",
        "state x = 0.0 then mean(r)\n" + rolled("a = r * next(x)", "keep if r > 0"),
        "state x = 0.0 then mean(r)\n" + rolled("keep if r > 0", "a = r * next(x)"),
    ),
    Code(
        "E0409", "the objective is not a sum over rows",
        "The gradient of an objective is summed over micro-batches and ranks. That is right only where the objective "
        "is affine in its sums and means over rows of trained outputs: nothing can take the logarithm of a mean before "
        "the mean is whole. Statistics of constants and of `stop(...)` may stand anywhere, and reductions over tokens "
        "or groups too.",
        "take the function inside the mean, or the statistic of `stop(...)`",
        updated("train actor to maximize log(mean(exp(actor.logprobs(y))))"),
        updated("train actor to maximize mean(actor.logprobs(y))"),
    ),
    Code(
        "E0410", "unknown optimizer `{name}`",
        "There is `adamw`, with the options `lr`, `betas`, `eps`, `weight_decay` and `max_grad_norm`.",
        "", 'model m = policy("builtin:tiny") trained by adam(lr=1e-4)',
        'model m = policy("builtin:tiny") trained by adamw(lr=1e-4)',
    ),
    Code(
        "E0411", "`adamw` takes keywords, `lr` among them",
        "A learning rate has no good default: it is a number or a schedule.",
        "write `adamw(lr=1e-5)`", 'model m = policy("builtin:tiny") trained by adamw(1e-4)',
        'model m = policy("builtin:tiny") trained by adamw(lr=1e-4)',
    ),
    Code(
        "E0412", "unknown schedule `{name}`",
        "A learning rate is a number, or `constant`, `linear` or `cosine` of one, with `warmup` steps, and `steps` and "
        "`low` for the decay. Steps are those of the optimizer.",
        "", 'model m = policy("builtin:tiny") trained by adamw(lr=step(1e-4))',
        'model m = policy("builtin:tiny") trained by adamw(lr=cosine(1e-4, warmup=10))',
    ),
    Code(
        "E0413", "`{option}` is {rule}, not `{value}`",
        "The options of an optimizer or schedule have ranges.",
        "give it {rule}, or leave `{option}` out",
        'model m = policy("builtin:tiny") trained by adamw(lr=-1)',
        'model m = policy("builtin:tiny") trained by adamw(lr=1e-4)',
    ),
)
