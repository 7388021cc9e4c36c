"""E02: dims and types."""

from rlhf_dsl.codes.code import Code
from rlhf_dsl.codes.example import declared, rolled

_POLICY = 'model m = policy("builtin:tiny")\n'
_PAIR = _POLICY + "dim s <= 8\nrollout:\n    y[b, t] = m.generate(q)\n    z[b, s] = m.generate(q)\n"
_LENGTH = "    y[b, t] = m.generate(q)\n    metric n = mean(length[t](y))\n"

CODES: tuple[Code, ...] = (
    Code(
        "E0201", "unknown dim `{name}`",
        "Dims are declared: `dim b = 64` is fixed, `dim t <= 32` is ragged.",
        "declare it: `dim {name} = N`, or `dim {name} <= N` if each row has its own length",
        rolled("a = mean[k](r)"), rolled("a = mean[g](r)"),
    ),
    Code(
        "E0202", "dimensions do not match: `{left}` and `{right}`",
        "Arithmetic goes by the names of dims, and only where the dims of one side contain those of the other. This "
        "catches mixing values of two responses, whose tokens have nothing to do with each other.",
        "each side has a dimension the other lacks; reduce one (`sum[{dim}](...)`) or use the same response",
        declared(_PAIR + "    k = m.logprobs(y) - m.logprobs(z)"),
        declared(_PAIR + "    k = sum[t](m.logprobs(y)) - sum[s](m.logprobs(z))"),
    ),
    Code(
        "E0203", "`{dim}` is no dim of `{type}`",
        "A reduction names dims that its argument has; so do the operations along a ragged dim.",
        "leave it out", rolled("a = sum[t](r)"), rolled("a = sum[g](r)"),
    ),
    Code(
        "E0204", "`{written}` differs from the type of the value, `{type}`",
        "Dims after a name on the left are checked: they say over what the value varies, in any order.",
        "correct the dims, or leave them out", rolled("a[b] = r"), rolled("a[b, g] = r"),
    ),
    Code(
        "E0205", "`keep` over the ragged dim `{dim}`",
        "`keep if` chooses rows, or samples of a group. Tokens are chosen where they are counted: `mean(x, "
        "where=...)`.",
        "reduce it (`any[{dim}](...)`, `all[{dim}](...)`), or restrict the reductions with `where=`",
        rolled("keep if actor.logprobs(y) > -5"), rolled("keep if all[t](actor.logprobs(y) > -5)"),
    ),
    Code(
        "E0206", "the ragged dim `{dim}` belongs to the response `{response}`",
        "A ragged dim is the length of one response, so that what varies over it fits together. Each response has its "
        "own.",
        "declare another: `dim {dim}2 <= N`", rolled("z[b, t] = actor.generate(q)"),
        declared(_PAIR.rstrip()),
    ),
    Code(
        "E0207", "the root dim `{dim}` has two sources",
        "The first dim of a data declaration counts the rows of its source; it has one. Columns of one file stand in "
        "one declaration.",
        "declare another dim, or put the columns into one declaration",
        declared('data p[b] = jsonl("p.jsonl", "prompt")'),
        declared('dim p = 4\ndata x[p] = jsonl("p.jsonl", "prompt")'),
    ),
    Code(
        "E0208", "the response `{name}` needs its dims",
        "A new response says over what it varies: the dims of its prompts, any group dims, and a ragged dim for its "
        "tokens.",
        "write them: `{name}[b, t] = ...`",
        declared('model m = policy("builtin:tiny")\nrollout:\n    y = m.generate(q)'),
        declared('model m = policy("builtin:tiny")\nrollout:\n    y[b, t] = m.generate(q)'),
    ),
    Code(
        "E0209", "these dims do not fit the response `{name}`: {reason}",
        "A response has all dims of what it is made from, and one ragged dim for its tokens. `generate` may add fixed "
        "dims: so many samples for each prompt. A dim that counts the rows of other data cannot be a group.",
        "write the dims of the prompts, any group dims, one ragged dim: `{name}[b, g, t]`",
        declared('model m = policy("builtin:tiny")\nrollout:\n    y[g, t] = m.generate(q)'),
        declared('model m = policy("builtin:tiny")\nrollout:\n    y[b, g, t] = m.generate(q)'),
    ),
    Code(
        "E0210", "reducing `{dim}` while `{ragged}` remains, whose lengths vary over it",
        "The t-th tokens of different responses do not belong together. Reduce the ragged dim first, or both at once.",
        "reduce both: `{op}[{dim}, {ragged}](...)`, or `{ragged}` first", rolled("a = mean[g](actor.logprobs(y))"),
        rolled("a = mean[g, t](actor.logprobs(y))"),
    ),
    Code(
        "E0211", "expected {wanted}, found `{found}`",
        "Values are numbers (`f32`), conditions (`bool`), texts or responses (`tokens`). In arithmetic a condition "
        "counts as 0 or 1; a number is not a condition.",
        "", rolled("a = y + 1"), rolled("a = actor.logprobs(y) + 1"),
    ),
    Code(
        "E0212", "`{name}` needs {wanted} in brackets, found {found}",
        "`next`, `togo`, `at_end` and `length` walk along one ragged dim: `next[t](x)`. `argmax` finds a place along "
        "one dim. `next(x)` without a dim is the new value of a state.",
        "write it: `{name}[t](...)`", rolled("a = length(y)"), rolled("a = length[t](y)"),
    ),
    Code(
        "E0213", "`where=` varies over `{dim}`, which the value lacks",
        "A restriction says for each value that is reduced whether it takes part.",
        "reduce the condition first", rolled("a = mean(r, where=actor.logprobs(y) > -1)"),
        rolled("a = mean(r, where=mean[t](actor.logprobs(y)) > -1)"),
    ),
    Code(
        "E0214", "`{name}` of several values takes no dims and no keywords",
        "`{{max, min}}[t](x)` reduces one value, `max(x, y)` compares several element by element: both at once is "
        "unclear.",
        "write two calls: `{name}[t]({name}(x, y))`", rolled("a = max[g](r, 0)"), rolled("a = max[g](max(r, 0))"),
    ),
    Code(
        "E0215", "{what} is a scalar, this is `{type}`",
        "Metrics and states are one number: a value that still varies over dims must be reduced.",
        "reduce it: `mean(...)`", rolled("metric reward = r"), rolled("metric reward = mean(r)"),
    ),
    Code(
        "E0216", "the dims of the column `{name}`: {reason}",
        "A column has the root dim of its source, and a ragged dim if it is a response.",
        "a column has the dim of its rows, `{name}[b]`, and as a response a ragged dim behind it, `{name}[b, t]`",
        declared('dim p = 4\ndata x[p], z[g] = jsonl("p.jsonl", "a", "c")'),
        declared('dim p = 4\ndata x[p], z[p] = jsonl("p.jsonl", "a", "c")'),
    ),
    Code(
        "E0217", "`{formal}` of `{name}` varies over `{dim}`, which `{type}` lacks",
        "The dims of a function's formals are variables: they stand for the argument's dim of the same name, else for "
        "its only ragged dim.",
        "pass a value that varies over a ragged dim", rolled("a, c = gae(r, r, 1, 1)"),
        rolled("x = actor.logprobs(y)", "a, c = gae(x, x, 1, 1)"),
    ),
    Code(
        "E0218", "`{dim}` of `{name}` would be both `{first}` and `{second}`",
        "Within a call a dim of the function stands for one dim: its arguments vary over the same response.",
        "pass values of one response",
        declared(_PAIR + "    a, c = gae(m.logprobs(y), m.logprobs(z), 1, 1)"),
        declared(_PAIR + "    a, c = gae(m.logprobs(y), m.logprobs(y), 1, 1)"),
    ),
    Code(
        "E0219", "`{dim}` is the length of no response yet",
        "A ragged dim gets its lengths from the response that introduces it.",
        "bind the response above this line", declared("dim s <= 4\nrollout:\n    a = at_end[s](1)"),
        rolled("a = at_end[t](r)"),
    ),
    Code(
        "E0220", "`at_end[{dim}]` of a value that varies over `{extra}`",
        "`at_end[t](s)` puts one value on the last token of each response, so that `s` varies over dims of the "
        "response at most.",
        "reduce it first", rolled("a = at_end[t](actor.logprobs(y))"),
        rolled("a = at_end[t](sum[t](actor.logprobs(y)))"),
    ),
    Code(
        "E0221", "the dim `{name}` cannot be {size}",
        "A size is a whole number of at least 1.",
        "write a whole number from 1 up: `dim {name} = 64`",
        "dim b = 0", "dim b = 1",
    ),
    Code(
        "E0222", "the column `{name}` cannot be `{elem}`",
        "Columns are `text` unless they say otherwise: `bool` and `f32` for labels and numbers.",
        "", declared('dim p = 4\ndata x[p]: int = jsonl("p.jsonl", "a")'),
        declared('dim p = 4\ndata x[p]: f32 = jsonl("p.jsonl", "a")'),
    ),
    Code(
        "E0223", "`keep` needs a condition over rows, this is `{type}`",
        "`keep if` chooses rows: its condition varies over a root dim, and over group dims if single samples are "
        "chosen.",
        "leave the dim that counts the rows: `keep if mean[g](r) > 0`, or `keep if r > 0`",
        rolled("keep if mean(r) > 0"), rolled("keep if mean[g](r) > 0"),
    ),
    Code(
        "E0224", "the rows of `{dim}` are read by an `eval` and by the iteration",
        "An evaluation reads the first rows in file order, an iteration takes the next rows of a shuffled stream: they "
        "are different rows.",
        "declare data of its own, in `eval` with a dim of its own",
        declared(_POLICY + "dim s <= 8\nrollout:\n" + _LENGTH
                 + "eval:\n    z[b, s] = m.generate(q)\n    metric n = mean(length[s](z))"),
        declared(_POLICY + "eval:\n" + _LENGTH),
    ),
)
