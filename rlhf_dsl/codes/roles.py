"""E03: models, responses and data."""

from rlhf_dsl.codes.code import Code
from rlhf_dsl.codes.example import declared, rolled

_POLICY = 'model m = policy("builtin:tiny")\n'
_PAIRS = 'dim p = 4\ndim s <= 8\ndata x[p], z[p, s] after x = jsonl("p.jsonl", "a", "c")\n'

CODES: tuple[Code, ...] = (
    Code(
        "E0301", "unknown role `{role}`",
        "A model is a `policy`, a `value` or a `scorer`.",
        "", 'model m = critic("builtin:tiny")', 'model m = value("builtin:tiny")',
    ),
    Code(
        "E0302", "a {role} has no operation `{operation}`",
        "The role of a model says what it can do: a policy `generate`, `logprobs`, `entropy`; a value `values`, "
        "`last_value`; a scorer `score`, `scores`.",
        "", rolled("a = reward.logprobs(y)"), rolled("a = reward.score(y)"),
    ),
    Code(
        "E0303", "expected a response, found `{found}`",
        "Models read responses: what `generate` or `reply` made, or a column of data with a ragged dim.",
        "pass a response, such as `y` of `y[b, t] = actor.generate(prompts)`", rolled("a = reward.score(r)"),
        rolled("a = reward.score(y)"),
    ),
    Code(
        "E0304", "only a generated response has `logprobs`",
        "`y.logprobs` are those at which the sampler drew the tokens. A response of given tokens was not sampled.",
        "compute them with a policy: `actor.logprobs(y)`",
        declared(_PAIRS + "rollout:\n    a = z.logprobs"),
        declared(_POLICY + _PAIRS + "rollout:\n    a = m.logprobs(z)"),
    ),
    Code(
        "E0305", "`{name}` stands alone on the right of a binding, in `rollout` or `eval`",
        "A response has a name: its dims and its random draws go by it. It cannot be made inside another expression, "
        "in a function or in a declaration.",
        "bind it first: `y[b, t] = ...`",
        declared(_POLICY + 'model w = scorer("builtin:tiny-reward")\nrollout:\n    a = w.score(m.generate(q))'),
        rolled("a = reward.score(y)"),
    ),
    Code(
        "E0306", "`{second}` reads the tokens of `{response}` with another tokenizer than `{first}`",
        "The tokens of a response mean something to one tokenizer only. A scorer's `score` is the exception: it gets "
        "the text.",
        "use models of one tokenizer, or make the response of its text: `reply(prompts, y.text)`",
    ),
    Code(
        "E0307", "the source of the model `{name}` is not a text",
        "A source is a built-in model (`\"builtin:tiny\"`), a local Hugging Face folder or a Hub id.",
        'write it in quotes: `"builtin:tiny"`, or the path of a folder',
        "model m = policy(1)", _POLICY.rstrip(),
    ),
    Code(
        "E0308", "`{option}` is {rule}, not `{value}`",
        "The options of a sampler: `temperature` (at least 0; 0 takes the most likely token), `top_k`, `top_p` in (0, "
        "1], `stop`, `min_tokens`, `max_tokens` (at most the bound of the ragged dim); `env` and `turns` go together.",
        "give it {rule}, or leave `{option}` out",
        declared(_POLICY + "rollout:\n    y[b, t] = m.generate(q, temperature=-1)"),
        declared(_POLICY + "rollout:\n    y[b, t] = m.generate(q, temperature=1)"),
    ),
    Code(
        "E0309", "`{first}` and `{second}` have different roles",
        "`copy` and `ema` move weights between models of the same role.",
        "name two policies, two value models or two scorers",
        _POLICY + 'model v = value("builtin:tiny")\nrun:\n    every 2: copy(m, v)',
        _POLICY + 'model v = policy("builtin:tiny")\nrun:\n    every 2: copy(m, v)',
    ),
    Code(
        "E0310", "unknown data source `{name}`",
        "Data comes from `jsonl`, `parquet`, `hf`, or a kind that an installed package gives.",
        "", 'dim b = 4\ndata q[b] = json("q.jsonl", "prompt")', 'dim b = 4\ndata q[b] = jsonl("q.jsonl", "prompt")',
    ),
    Code(
        "E0311", "`{name}` names a file and {count} column{plural} of it",
        "A data declaration names as many columns of the file as it binds, in the same order, all as text.",
        'write `{name}("FILE", ...)` with one name for each column',
        'dim b = 4\ndata q[b], a[b] = jsonl("q.jsonl", "prompt")',
        'dim b = 4\ndata q[b], a[b] = jsonl("q.jsonl", "prompt", "answer")',
    ),
    Code(
        "E0312", "`{name}` is no text column of this declaration",
        "`after` names the column whose text is the prompt of the responses in the same declaration.",
        "", declared('dim p = 4\ndim s <= 8\ndata x[p], z[p, s] after q = jsonl("p.jsonl", "a", "c")'),
        declared('dim p = 4\ndim s <= 8\ndata x[p], z[p, s] after x = jsonl("p.jsonl", "a", "c")'),
    ),
    Code(
        "E0313", "nothing follows `{name}`: no column of this declaration has a ragged dim",
        "A column with a ragged dim is a response; `after` says which prompt it follows.",
        "give the response a ragged dim, or take `after` out",
        declared('dim p = 4\ndata x[p], z[p] after x = jsonl("p.jsonl", "a", "c")'),
        declared('dim p = 4\ndata x[p], z[p] = jsonl("p.jsonl", "a", "c")'),
    ),
)
