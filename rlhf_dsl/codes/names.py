"""E01: names."""

from rlhf_dsl.codes.code import Code
from rlhf_dsl.codes.example import declared, rolled, updated

CODES: tuple[Code, ...] = (
    Code(
        "E0101", "unknown name `{name}`",
        "Nothing of this name is declared, bound above, or built in.",
        "declare it, or bind it above this line", rolled("adv = rr - 1"), rolled("adv = r - 1"),
    ),
    Code(
        "E0102", "`{name}` is used above its binding",
        "A section is computed from top to bottom, and a param sees those above it: a name is bound above its use.",
        "move the line that binds it above this one", rolled("a = c + 1", "c = r * 2"), rolled("c = r * 2",
        "a = c + 1"),
    ),
    Code(
        "E0103", "`{name}` is bound twice",
        "A name has one meaning in the whole program, and in an update those of the rollout count too. Metrics have "
        "names of their own.",
        "choose another name", rolled("a = r", "a = r + 1"), rolled("a = r", "c = r + 1"),
    ),
    Code(
        "E0104", "`{name}` is built in and cannot be bound",
        "Builtins mean the same in every program. The names of the prelude, such as `gae`, may be defined anew.",
        "choose another name", rolled("mean = r"), rolled("m = r"),
    ),
    Code(
        "E0105", "`{name}` is {kind}, here stands {wanted}",
        "Models, functions and Python ops are no values: they are called. Where a model's name is expected, no value "
        "can stand.",
        "write {wanted} in its place",
        rolled("a = actor + 1"), rolled("a = actor.logprobs(y) + 1"),
    ),
    Code(
        "E0106", "`{name}` cannot be called",
        "Functions, Python ops, builtins and the operations of models can be called.",
        "write `{name}` without brackets, or call a function, a Python op or an operation of a model",
        rolled("a = r(y)"), rolled("a = reward.score(y)"),
    ),
    Code(
        "E0107", "`{name}` cannot be seen from here",
        "`update` sees what `rollout` binds; otherwise a section sees its own names and those declared at the top.",
        "bind it here, or in `rollout` if an update needs it",
        updated("ratio = exp(actor.logprobs(y))", "train actor to maximize mean(ratio)")
        + "\nstate x = 0.0 then mean(ratio)",
        updated("train actor to maximize mean(actor.logprobs(y))") + "\nstate x = 0.0 then mean(r)",
    ),
    Code(
        "E0108", "`{name}` calls itself",
        "Functions are expanded where they are called, so that a function that needs itself would never end. Sums that "
        "run along a response are `togo[t]`.",
        "take the call of itself out; a sum along a response is `togo[t](x, d)`",
        "fn f(x):\n    return f(x)\nparam a = f(1)", "fn f(x):\n    return x\nparam a = f(1)",
    ),
    Code(
        "E0109", "`{name}` takes {expected}, {given} given",
        "The number of arguments differs from the signature.",
        "", rolled("a = clip(r, 0)"), rolled("a = clip(r, 0, 1)"),
    ),
    Code(
        "E0110", "`{name}` takes no keyword `{keyword}` here",
        "The keyword is unknown to what is called, or it is given twice.",
        "", rolled("a = mean[g](r, mask=r > 0)"), rolled("a = mean[g](r, where=r > 0)"),
    ),
    Code(
        "E0111", "{given} for {names}",
        "A function that returns several values is bound to as many names: `a, ret = gae(r, v, gamma, lam)`.",
        "bind as many names as there are values", rolled("a, c = r + 1"), rolled("a = r + 1"),
    ),
    Code(
        "E0112", "a list is not a value",
        "Lists are settings, such as `betas=[0.9, 0.95]` and `stop=[\"###\"]`. Values vary over named dims instead.",
        "name the values one by one, as in `max(x, y)`; what varies has a dim",
        rolled("a = [1, 2]"), rolled("a = r"),
    ),
    Code(
        "E0113", "a response has no field `{field}`",
        "A response has `logprobs`, at which the sampler drew its tokens, `truncated` and `text`.",
        "", rolled("a = y.logprob"), rolled("a = y.logprobs"),
    ),
    Code(
        "E0114", "`{name}` takes no dims in brackets",
        "Reductions and operations along a ragged dim take dims in brackets: `sum[t](x)`, `next[t](x)`. Others work "
        "element by element, or on a whole response.",
        "take the brackets out", rolled("a = exp[g](r)"), rolled("a = exp(r)"),
    ),
    Code(
        "E0115", "`{call}` is an operation and must be called",
        "The operations of a model take a response: `actor.logprobs(y)`.",
        "write `{call}(y)` for a response `y`", rolled("a = actor.logprobs"), rolled("a = actor.logprobs(y)"),
    ),
    Code(
        "E0116", "the section `{section}` stands twice",
        "A program has one `rollout`, one `plan` and one `run`; `update` and `eval` may stand several times.",
        "put all lines into one", declared("run:\n    seed = 1\nrun:\n    steps = 2"),
        declared("run:\n    seed = 1\n    steps = 2"),
    ),
)
