"""W01: warnings."""

from rlhf_dsl.codes.code import Code
from rlhf_dsl.codes.example import rolled, updated

_UNTRAINED = """\
dim b  = 4
dim t <= 8
data q[b] = jsonl("q.jsonl", "prompt")
model m = policy("builtin:tiny")
rollout:
    y[b, t] = m.generate(q)
update:
    metric n = mean(m.entropy(y))"""

CODES: tuple[Code, ...] = (
    Code(
        "W0101", "`{name}` is never used",
        "Nothing reads it; if nothing needs it, it is not computed. A name that starts with `_` may stay unused.",
        "take it out, or write it as a `metric`", "param a = 1", "param a = 1\nrollout:\n    metric m = a",
    ),
    Code(
        "W0102", "`{name}` hides the function of the prelude",
        "Names of the prelude may be defined anew; from then on they mean what the program says, also for readers who "
        "know the other.",
        "choose another name if that is not meant",
        updated("k1 = r", "train actor to maximize mean(actor.logprobs(y) * k1)"),
        updated("kl = r", "train actor to maximize mean(actor.logprobs(y) * kl)"),
    ),
    Code(
        "W0103", "`{name}` has an optimizer, but nothing trains it",
        "A model with `trained by` needs memory for gradients and moments, and a `train` line that uses them.",
        "write `train {name} to maximize ...` in an update, or take `trained by` out",
        rolled("metric m = mean(r)"), updated("train actor to maximize mean(actor.logprobs(y) * r)"),
    ),
    Code(
        "W0104", "this update trains nothing",
        "An update without a `train` line computes metrics at most.",
        "write `train M to maximize E`", _UNTRAINED,
        updated("train actor to maximize mean(actor.logprobs(y) * r)"),
    ),
)
