"""The tables of the language: primitives, surface builtins, operations of roles. Docs and `rlflowc ops` come from here.

The checker turns every surface form into the `PRIMITIVES`; compiler, runtime and oracle know no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlhf_dsl.typed import Expr

PRELUDE_PATH = Path(__file__).with_name("prelude.rlflow")


@dataclass(frozen=True)
class Primitive:
    """kind: "leaf", "elementwise", "reduction", "ragged", "model" or "response"."""

    name: str
    signature: str
    meaning: str
    kind: str
    differentiable: bool = True


@dataclass(frozen=True)
class Builtin:
    """A name that programs may use. kind: "elementwise", "reduction", "ragged", "choice" (both) or "response".

    arity: least and most positional arguments; most = -1 for any number
    """

    name: str
    signature: str
    meaning: str
    kind: str
    arity: tuple[int, int]


@dataclass(frozen=True)
class Operation:
    """What a model of `role` can do. per: "response" (one value each), "token", or "sample" (makes a response)."""

    role: str
    name: str
    signature: str
    meaning: str
    per: str


def _table(entries):
    return {entry.name: entry for entry in entries}


PRIMITIVES: dict[str, Primitive] = _table([
    Primitive("const", "value -> f32 | bool | text", "a number, boolean or text known before the run", "leaf", False),
    Primitive("data", "column -> text | f32 | bool | tokens", "a column of this iteration's rows", "leaf", False),
    Primitive("state", "name -> f32 | bool", "a state's value throughout this iteration", "leaf", False),
    Primitive("next_state", "name -> f32 | bool", "a state's value for the next iteration", "leaf", False),
    Primitive("generate", "prompts -> tokens", "a response sampled by a policy", "response", False),
    Primitive("reply", "prompts, texts -> tokens", "a response of given texts", "response", False),
    Primitive("call", "response -> f32", "an operation of a model on a response, by the weights of `phase`", "model"),
    Primitive("pyop", "args -> f32 | bool | text", "a Python function marked `@op`", "model", False),
    Primitive("field", "response -> f32 | bool | text", "`logprobs`, `truncated` or `text` of a response", "response",
              False),
    *(Primitive(name, signature, meaning, "elementwise") for name, signature, meaning in [
        ("add", "x, y -> f32", "x + y"),
        ("sub", "x, y -> f32", "x - y"),
        ("mul", "x, y -> f32", "x y"),
        ("div", "x, y -> f32", "x / y of real numbers"),
        ("pow", "x, y -> f32", "x to the power y"),
        ("neg", "x -> f32", "-x"),
        ("exp", "x -> f32", "e to the power x"),
        ("log", "x -> f32", "natural logarithm"),
        ("sqrt", "x -> f32", "square root"),
        ("abs", "x -> f32", "absolute value; gradient 0 at 0"),
        ("sigmoid", "x -> f32", "1 / (1 + exp(-x))"),
        ("log_sigmoid", "x -> f32", "log(sigmoid(x)), without overflow"),
        ("minimum", "x, y, ... -> f32", "the least; ties share the gradient equally"),
        ("maximum", "x, y, ... -> f32", "the greatest; ties share the gradient equally"),
        ("clip", "x, low, high -> f32", "x held between low and high; the gradient passes at the bounds"),
        ("where", "bool, x, y -> f32 | bool", "x where the condition is true, else y; the other branch is ignored"),
    ]),
    *(Primitive(name, signature, meaning, "elementwise", False) for name, signature, meaning in [
        ("sign", "x -> f32", "-1, 0 or 1"),
        ("stop", "x -> x", "x, as a constant"),
        ("eq", "x, y -> bool", "x equals y"),
        ("ne", "x, y -> bool", "x differs from y"),
        ("lt", "x, y -> bool", "x < y"),
        ("le", "x, y -> bool", "x <= y"),
        ("gt", "x, y -> bool", "x > y"),
        ("ge", "x, y -> bool", "x >= y"),
        ("and", "bool, bool -> bool", "both are true"),
        ("or", "bool, bool -> bool", "one at least is true"),
        ("not", "bool -> bool", "it is false"),
    ]),
    *(Primitive(name, signature, meaning, "reduction") for name, signature, meaning in [
        ("sum", "x[over], where? -> f32", "sum; of nothing 0"),
        ("mean", "x[over], where? -> f32", "sum over count; of nothing 0; of equal values exactly their value"),
        ("std", "x[over], where? -> f32", "standard deviation, n-1 if unbiased else n; of one value or equal ones 0"),
        ("max", "x[over], where? -> f32", "the greatest; ties share the gradient equally; of nothing 0"),
        ("min", "x[over], where? -> f32", "the least; ties share the gradient equally; of nothing 0"),
        ("quantile", "x[over], q, where? -> f32", "the q-quantile, linear between neighbours; of nothing 0"),
    ]),
    *(Primitive(name, signature, meaning, "reduction", False) for name, signature, meaning in [
        ("argmax", "x[over], where? -> f32", "index of the first greatest value along one dim"),
        ("rank", "x[over], where? -> f32[over]", "how many values are less, from 0; equal values share it"),
        ("count", "x[over], where? -> f32", "true values; of numbers, how many there are"),
        ("any", "bool[over], where? -> bool", "one at least is true"),
        ("all", "bool[over], where? -> bool", "none is false"),
    ]),
    Primitive("next", "x[.., t] -> f32[.., t]", "the value at the following own token, 0 after the last", "ragged"),
    Primitive("togo", "x[.., t], d -> f32[.., t]", "A_t = x_t + d_t A_{t+1}", "ragged"),
    Primitive("at_end", "s[..], length? -> f32[.., t]",
              "s at the last own token, 0 elsewhere; the length of a response that s does not read", "ragged"),
    Primitive("length", "response -> f32[..]", "the number of own tokens", "ragged", False),
])

_ELEMENTWISE = [
    Builtin("exp", "exp(x)", PRIMITIVES["exp"].meaning, "elementwise", (1, 1)),
    Builtin("log", "log(x)", PRIMITIVES["log"].meaning, "elementwise", (1, 1)),
    Builtin("sqrt", "sqrt(x)", PRIMITIVES["sqrt"].meaning, "elementwise", (1, 1)),
    Builtin("abs", "abs(x)", PRIMITIVES["abs"].meaning, "elementwise", (1, 1)),
    Builtin("sign", "sign(x)", PRIMITIVES["sign"].meaning, "elementwise", (1, 1)),
    Builtin("sigmoid", "sigmoid(x)", PRIMITIVES["sigmoid"].meaning, "elementwise", (1, 1)),
    Builtin("log_sigmoid", "log_sigmoid(x)", PRIMITIVES["log_sigmoid"].meaning, "elementwise", (1, 1)),
    Builtin("clip", "clip(x, low, high)", PRIMITIVES["clip"].meaning, "elementwise", (3, 3)),
    Builtin("where", "where(condition, x, y)", PRIMITIVES["where"].meaning, "elementwise", (3, 3)),
    Builtin("stop", "stop(x)", "x as a constant: no gradient passes", "elementwise", (1, 1)),
]

_REDUCTIONS = [
    Builtin("sum", "sum[dims](x, where=)", PRIMITIVES["sum"].meaning, "reduction", (1, 1)),
    Builtin("mean", "mean[dims](x, where=)", PRIMITIVES["mean"].meaning, "reduction", (1, 1)),
    Builtin("std", "std[dims](x, where=, unbiased=true)", PRIMITIVES["std"].meaning, "reduction", (1, 1)),
    Builtin("max", "max[dims](x, where=) or max(x, y, ...)", "the greatest along dims, or of several values", "choice",
            (1, -1)),
    Builtin("min", "min[dims](x, where=) or min(x, y, ...)", "the least along dims, or of several values", "choice",
            (1, -1)),
    Builtin("argmax", "argmax[dim](x, where=)", PRIMITIVES["argmax"].meaning, "reduction", (1, 1)),
    Builtin("rank", "rank[dims](x, where=)", PRIMITIVES["rank"].meaning + "; keeps the dims", "reduction", (1, 1)),
    Builtin("quantile", "quantile[dims](x, q, where=)", PRIMITIVES["quantile"].meaning, "reduction", (2, 2)),
    Builtin("count", "count[dims](x, where=)", PRIMITIVES["count"].meaning, "reduction", (1, 1)),
    Builtin("any", "any[dims](x, where=)", PRIMITIVES["any"].meaning, "reduction", (1, 1)),
    Builtin("all", "all[dims](x, where=)", PRIMITIVES["all"].meaning, "reduction", (1, 1)),
]

_RAGGED = [
    Builtin("next", "next[t](x) or next(state)", PRIMITIVES["next"].meaning + "; of a state, its new value", "ragged",
            (1, 1)),
    Builtin("togo", "togo[t](x, d)", PRIMITIVES["togo"].meaning, "ragged", (2, 2)),
    Builtin("at_end", "at_end[t](s)", "s at the last own token, 0 elsewhere", "ragged", (1, 1)),
    Builtin("length", "length[t](y)", PRIMITIVES["length"].meaning, "ragged", (1, 1)),
]

_RESPONSES = [Builtin("reply", "y[b, t] = reply(prompts, texts)", PRIMITIVES["reply"].meaning, "response", (2, 2))]

BUILTINS: dict[str, Builtin] = _table([*_ELEMENTWISE, *_REDUCTIONS, *_RAGGED, *_RESPONSES])

OPERATIONS: tuple[Operation, ...] = (
    Operation("policy", "generate", "generate(prompts, temperature=1.0, top_k=, top_p=, stop=[], min_tokens=, "
              "max_tokens=)", "samples a response to each prompt", "sample"),
    Operation("policy", "logprobs", "logprobs(y, temperature=)", "log-probability of each own token, at the "
              "temperature of the response unless given", "token"),
    Operation("policy", "entropy", "entropy(y, temperature=)", "entropy of the distribution of each own token",
              "token"),
    Operation("value", "values", "values(y)", "value before each own token is drawn", "token"),
    Operation("value", "last_value", "last_value(y)", "value after the last own token", "response"),
    Operation("scorer", "score", "score(y)", "score after the last token", "response"),
    Operation("scorer", "scores", "scores(y)", "score after each own token", "token"),
)

ROLES: dict[str, dict[str, Operation]] = {
    role: {op.name: op for op in OPERATIONS if op.role == role} for role in ("policy", "value", "scorer")
}

TEMPERED = ("logprobs", "entropy")

FIELDS: dict[str, str] = {
    "logprobs": "log-probabilities at which the sampler drew the tokens (f32, per token)",
    "truncated": "whether the bound was hit without an end token (bool, per response)",
    "text": "the decoded response (text, per response)",
}


@cache
def prelude_text() -> str:
    """The prelude, a text in the language itself."""
    return PRELUDE_PATH.read_text(encoding="utf-8")


def call_text(expr: Expr) -> str:
    """A model call or Python op as `fmt` prints it: `actor.logprobs(y)`, `exact_match(y.text, answers)`."""
    if expr.op == "pyop":
        return expr.attr("text")
    if expr.op != "call":
        raise ValueError(f"`{expr.op}` is not a call")
    response, temperature = expr.args[0], expr.attr("temperature")
    name = response.attr("column") if response.op == "data" else response.attr("name")
    given = "" if temperature is None else f", temperature={temperature:g}"
    return f"{expr.attr('model')}.{expr.attr('operation')}({name}{given})"
