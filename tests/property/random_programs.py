"""Random small programs that are right, and random numbers for what they are fed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

HEAD = """\
dim b  = {b}
dim g  = {g}
dim t <= 8
data q[b] = jsonl("q.jsonl", "prompt")
model actor  = policy("builtin:tiny") trained by adamw(lr=1e-3)
model critic = value("builtin:tiny") trained by adamw(lr=1e-3)
model judge  = scorer("builtin:tiny-reward")
state pull   = 0.5 then {following}

rollout:
    y[b, g, t] = actor.generate(q)
"""
ROW, SAMPLE, TOKEN = ("b",), ("b", "g"), ("b", "g", "t")
CHAIN = ((), ROW, SAMPLE, TOKEN)  # each broadcasts to the next
ROLLOUT = {"actor.logprobs(y)": TOKEN, "judge.score(y)": SAMPLE, "length[t](y)": SAMPLE, "pull": (), "0.5": ()}
FED = {"rollout": {"actor.logprobs(y)": TOKEN, "judge.score(y)": SAMPLE},
       "update": {"actor.logprobs(y)": TOKEN, "critic.values(y)": TOKEN}}


@dataclass(frozen=True)
class Written:
    """An expression with its dims."""

    text: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """Its text and sizes; `minibatches` is that of the update."""

    text: str
    sizes: dict[str, int]

    def feed(self, seed: int) -> dict[str, Any]:
        """Numbers with many digits: no two are equal, so that no rounding decides a comparison."""
        numbers = random.Random(seed)
        lengths = [[numbers.choice((1, 1, 2, 3, 5)) for _ in range(self.sizes["g"])] for _ in range(self.sizes["b"])]

        def call(dims: tuple[str, ...]) -> Any:
            if dims == SAMPLE:
                return [[numbers.uniform(-1, 2) for _ in row] for row in lengths]
            return [[[numbers.uniform(-2, 0.5) for _ in range(n)] for n in row] for row in lengths]

        return {
            "responses": {"y": {"lengths": lengths}}, "state": {"pull": numbers.uniform(0.1, 1)},
            "calls": {section: {text: call(dims) for text, dims in calls.items()} for section, calls in FED.items()}}


def _join(*parts: Written) -> tuple[str, ...]:
    return max((p.dims for p in parts), key=len)


@st.composite
def expressions(draw, leaves: dict[str, tuple[str, ...]], depth: int, over_rows: bool) -> Written:
    """Of any dims; `over_rows`: reductions may run over the rows, too."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        text = draw(st.sampled_from(sorted(leaves)))
        return Written(text, leaves[text])
    inner = expressions(leaves, depth - 1, over_rows)
    kind = draw(st.sampled_from(("binary", "binary", "unary", "choice", "reduction", "reduction", "ragged")))
    return {"binary": _binary, "unary": _unary, "choice": _choice, "reduction": _reduction, "ragged": _ragged}[kind](
        draw, inner, over_rows)


def _binary(draw, inner, _) -> Written:
    x, y = draw(inner), draw(inner)
    return Written(f"({x.text} {draw(st.sampled_from('+-*'))} {y.text})", _join(x, y))


def _unary(draw, inner, _) -> Written:
    x = draw(inner)
    form = draw(st.sampled_from((
        "exp(clip({}, -2, 1))", "abs({})", "sigmoid({})", "log_sigmoid({})", "-{}", "sqrt(abs({}) + 1)",
        "clip({}, -1.03, 0.7)", "stop({})")))
    return Written(form.format(x.text), x.dims)


def _choice(draw, inner, _) -> Written:
    x, y = draw(inner), draw(inner)
    form = draw(st.sampled_from(("min({x}, {y})", "max({x}, {y})", "where({x} > {y}, {x}, {y})")))
    return Written(form.format(x=x.text, y=y.text), _join(x, y))


def _reduction(draw, inner, over_rows: bool) -> Written:
    x = draw(inner)
    ends = [dims for dims in CHAIN[0 if over_rows else 1:] if len(dims) < len(x.dims)]
    if not ends:
        return x
    left = draw(st.sampled_from(ends))
    over = ", ".join(x.dims[len(left):])
    forms = ["sum[{o}]({x})", "mean[{o}]({x})", "std[{o}]({x})", "std[{o}]({x}, unbiased=false)", "max[{o}]({x})",
             "mean[{o}]({x}, where={x} > 0.123)", "count[{o}]({x} > 0.321)", "quantile[{o}]({x}, 0.3)"]
    return Written(draw(st.sampled_from(forms)).format(o=over, x=x.text), left)


def _ragged(draw, inner, _) -> Written:
    x = draw(inner)
    if x.dims == TOKEN:
        return Written(draw(st.sampled_from(("next[t]({})", "togo[t]({}, 0.9)"))).format(x.text), TOKEN)
    return Written(f"at_end[t]({x.text})", TOKEN)


@st.composite
def programs(draw) -> Program:
    """A rollout of some values, perhaps with a `keep`, and an update that trains two models."""
    sizes = {"b": draw(st.sampled_from((2, 4, 6))), "g": draw(st.integers(1, 3))}
    minibatches = draw(st.sampled_from((1, 2)))
    known, lines = dict(ROLLOUT), []
    for i in range(draw(st.integers(1, 3))):
        value = draw(expressions(known, 3, over_rows=True))
        lines.append(f"    x{i} = {value.text}")
        known[f"x{i}"] = value.dims
        if i == 0 and draw(st.booleans()):
            lines.append(f"    keep if {draw(st.sampled_from(('mean[g](judge.score(y))', 'judge.score(y)')))} > 0.2")
    scalars = [name for name, dims in known.items() if dims == ()]
    lines.append(f"    metric last = mean({draw(expressions(known, 2, over_rows=True)).text})")
    lines.append(f"update(minibatches={minibatches}):")
    lines += _training(draw, "actor", "actor.logprobs(y)", known)
    lines += _training(draw, "critic", "critic.values(y)", known)
    following = draw(st.sampled_from((
        "pull * 0.9", "clip(pull + mean(judge.score(y)), 0, 1)", f"0.5 * ({scalars[-1]}) + pull")))
    return Program(HEAD.format(**sizes, following=following) + "\n".join(lines) + "\n", sizes)


def _training(draw, model: str, call: str, known: dict[str, tuple[str, ...]]) -> list[str]:
    """An objective that is affine in means over rows, over arithmetic that reads the model's outputs."""
    leaves = {name: dims for name, dims in known.items() if name != "actor.logprobs(y)"} | {call: TOKEN}
    terms = []
    for _ in range(draw(st.integers(1, 2))):
        inside = draw(expressions(leaves, 2, over_rows=False))
        term = f"{inside.text} + 0.7 * {call}"
        form = draw(st.sampled_from((
            "mean({})", "mean(mean[t]({}))", "mean(sum[t]({}))", "sum({}) / b", "mean(mean[g, t]({}))",
            "stop(mean({c})) * mean({})", "mean({}, where={c} > -1)")))
        terms.append(form.format(term, c=call))
    return [f"    train {model} to {draw(st.sampled_from(('maximize', 'minimize')))} {' - '.join(terms)}"]
