"""Random equations of given dims, from what is known at a place.

Numbers stay small: what an equation says must not hang on rounding, so that two runs of it can be compared.
"""

from __future__ import annotations

import random
from typing import Callable, Optional

from tests.writing.nodes import Dims, Known, Node, Response, number

CONSTANTS = (0.5, 1, 2, 0.25, "-1.3", "eps", "g", "b")
UNARY = (
    "exp(clip({}, -3, 1))", "log(abs({}) + 0.5)", "sqrt(abs({}) + 0.3)", "abs({})", "sigmoid({})", "log_sigmoid({})",
    "(-{})", "clip({}, -1.1, 0.9)", "({}) ** 2", "({} + 2.1) / 3", "k2({}, 0.3)", "half({})")
CUTTING = ("stop({})", "sign({} - 0.0123)")
BINARY = ("({} + {})", "({} - {})", "({} * {})", "({} / (abs({}) + 0.7))", "min({}, {})", "max({}, {})", "k1({}, {})",
          "k3(clip({}, -2, 0.1), clip({}, -2, 0.2))", "blend({}, {}, eps)", "clipped({}, {}, eps, 0.3)")
COMPARISONS = ("({} > {} + 0.0317)", "({} <= {} - 0.0211)", "(-0.517 < {} < {} + 0.731)")
REDUCTIONS = ("sum{o}({})", "mean{o}({})", "std{o}({})", "std{o}({}, unbiased=false)", "max{o}({})", "min{o}({})",
              "quantile{o}({}, 0.3)", "mean{o}({})", "sum{o}({})")
LIMITED = ("sum{o}({}, where={})", "mean{o}({}, where={})", "std{o}({}, where={})", "max{o}({}, where={})",
           "count{o}({}, where={})", "quantile{o}({}, 0.7, where={})")
COUNTING = ("count{o}({})", "any{o}({})", "all{o}({})")
OPERATIONS = {
    "policy": (("{m}.logprobs({y})", True), ("{m}.entropy({y})", True), ("{m}.logprobs({y}, temperature=1.7)", True),
               ("{m}.entropy({y}, temperature=0.6)", True)),
    "value": (("{m}.values({y})", True), ("{m}.last_value({y})", False)),
    "scorer": (("{m}.score({y})", False), ("{m}.scores({y})", True)),
}
MODES = ("binary", "binary", "binary", "unary", "unary", "reduction", "reduction", "reduction", "choice", "ragged",
         "pool", "whiten", "rank", "op")


class Writer:
    """roles: of the models that may be called; trained: in an update, the models that it trains.

    separable: the model of whose objective this is a part; its statistics are stopped
    """

    def __init__(self, numbers: random.Random, known: Known, roles: dict[str, str],
                 trained: frozenset[str] = frozenset(), ops: bool = False) -> None:
        self.numbers, self.known, self.roles, self.trained, self.ops = numbers, known, roles, trained, ops
        self.separable = ""

    # ---- choices

    def chance(self, share: float) -> bool:
        return self.numbers.random() < share

    def value(self, depth: int, within: Optional[Dims] = None) -> Node:
        """Numbers over dims among `within`, or over any."""
        if depth == 0 or self.chance(0.12):
            return self.leaf(within)
        makers: dict[str, Callable] = {
            "binary": self._binary, "unary": self._unary, "reduction": self._reduction, "choice": self._choice,
            "ragged": self._ragged, "pool": self._pooled, "whiten": self._whitened, "rank": self._ranked,
            "op": self._op}
        node = makers[self.numbers.choice(MODES)](depth - 1, within) or self.leaf(within)
        node = self._separated(node)
        self.known.pool.append(node)
        return node

    def _separated(self, node: Node) -> Node:
        """A statistic of trained outputs stands stopped in an objective of theirs."""
        if self.separable and node.has_statistic(self.separable, self.known.roots):
            return Node("stop({})", (node,), node.dims, node.elem, cuts=True)
        return node

    # ---- leaves

    def leaf(self, within: Optional[Dims] = None) -> Node:
        if self.chance(0.15):
            return number(self.numbers.choice(CONSTANTS))
        found = [n for n in self.known.values if n.elem in ("f32", "bool") and _within(n.dims, within)]
        if found and self.chance(0.5):
            return self._separated(self.numbers.choice(found))
        made = self.output(within)
        return self._separated(made or (self.numbers.choice(found) if found else number(0.7)))

    def output(self, within: Optional[Dims] = None, model: str = "") -> Optional[Node]:
        """Something of a response: a model's output, or a field of it."""
        fits = [y for y in self.known.responses if _within(y.dims[:-1], within)]
        if not fits:
            return None
        y, models = self.numbers.choice(fits), [model] if model else sorted(self.roles)
        if not models or not model and self.chance(0.3):
            return self._field(y, within)
        called = self.numbers.choice(models)
        forms = [(f, per) for f, per in OPERATIONS[self.roles[called]] if not per or _within(y.dims, within)]
        if not forms:
            return None if model else self._field(y, within)
        form, per_token = self.numbers.choice(forms)
        dims = y.dims if per_token else y.dims[:-1]
        return Node(form.format(m=called, y=y.name), (), dims, model=called)

    def _field(self, y: Response, within: Optional[Dims]) -> Node:
        forms = [(f"length[{y.dims[-1]}]({y.name})", y.dims[:-1], "f32"), (f"{y.name}.truncated", y.dims[:-1], "bool")]
        if y.made == "generate" and _within(y.dims, within):
            forms += [(f"{y.name}.logprobs", y.dims, "f32")] * 3
        text, dims, elem = self.numbers.choice(forms)
        return Node(text, (), dims, elem, cuts=True)

    # ---- forms

    def _pooled(self, depth: int, within: Optional[Dims]) -> Optional[Node]:
        """A part of what was said before, said again."""
        found = [n for n in self.known.pool if n.elem in ("f32", "bool") and _within(n.dims, within)]
        return self.numbers.choice(found[-40:]) if found else None

    def _binary(self, depth: int, within: Optional[Dims]) -> Node:
        first = self.value(depth, within)
        second = self.value(depth, first.dims)
        args = (first, second) if self.chance(0.5) else (second, first)
        return Node(self.numbers.choice(BINARY), args, first.dims)

    def _unary(self, depth: int, within: Optional[Dims]) -> Node:
        x = self.value(depth, within)
        if self.chance(0.2):
            return Node(self.numbers.choice(CUTTING), (x,), x.dims, cuts=True)
        return Node(self.numbers.choice(UNARY), (x,), x.dims)

    def condition(self, depth: int, within: Optional[Dims] = None) -> Node:
        found = [n for n in self.known.values if n.elem == "bool" and _within(n.dims, within)]
        if found and self.chance(0.2):
            return self.numbers.choice(found)
        if depth > 0 and self.chance(0.25):
            x = self.condition(depth - 1, within)
            form = self.numbers.choice(("({} and {})", "({} or {})", "(not {})"))
            args = (x,) if "not" in form else (x, self.condition(depth - 1, x.dims))
            return Node(form, args, x.dims, "bool", cuts=True)
        x = self.value(max(depth - 1, 0), within)
        form = self.numbers.choice(COMPARISONS)
        return Node(form, (x, self.value(0, x.dims)), x.dims, "bool", cuts=True)

    def _choice(self, depth: int, within: Optional[Dims]) -> Node:
        x = self.value(depth, within)
        return Node("where({}, {}, {})", (self.condition(depth, x.dims), x, self.value(depth, x.dims)), x.dims)

    def _reduction(self, depth: int, within: Optional[Dims]) -> Optional[Node]:
        return self.reduction(self.value(depth), within)

    def reduction(self, x: Node, within: Optional[Dims]) -> Optional[Node]:
        """Of some dims of `x`, so that what is left is among `within`."""
        over = self._over(x.dims, within)
        if not over:
            return None
        brackets = "" if over == x.dims and self.chance(0.5) else f"[{', '.join(over)}]"
        rest, kind = tuple(d for d in x.dims if d not in over), self.numbers.random()
        if kind < 0.2:
            where = self.condition(1, x.dims)
            form = self.numbers.choice(LIMITED).replace("{o}", brackets)
            return Node(form, (x, where), rest, over=over, cuts=form.startswith("count"))
        if kind < 0.35 or x.elem == "bool":
            truth = x if x.elem == "bool" else Node("({} > 0.123)", (x,), x.dims, "bool")
            form = self.numbers.choice(COUNTING).replace("{o}", brackets)
            return Node(form, (truth,), rest, "f32" if form.startswith("count") else "bool", over, cuts=True)
        return Node(self.numbers.choice(REDUCTIONS).replace("{o}", brackets), (x,), rest, over=over)

    def _over(self, dims: Dims, within: Optional[Dims]) -> Dims:
        """The ragged dim goes where a dim of its lead does."""
        over = {d for d in dims if within is not None and d not in within or self.chance(0.5)}
        ragged = next((d for d in dims if d in self.known.lead), None)
        if ragged and over & set(self.known.lead[ragged]):
            over.add(ragged)
        return tuple(d for d in dims if d in over)

    def _ranked(self, depth: int, within: Optional[Dims]) -> Optional[Node]:
        x = self.value(depth, within)
        over = self._over(x.dims, None)
        if not over or x.elem == "bool":
            return None
        if len(over) == 1 and self.chance(0.3):
            rest = tuple(d for d in x.dims if d not in over)
            return Node(f"argmax[{over[0]}]({{}})", (x,), rest, over=over, cuts=True)
        return Node(f"rank[{', '.join(over)}]({{}})", (x,), x.dims, over=over, cuts=True)

    def _whitened(self, depth: int, within: Optional[Dims]) -> Node:
        x = self.value(depth, within)
        return Node("whiten({})", (x,), x.dims, over=x.dims) if x.dims else x

    def _ragged(self, depth: int, within: Optional[Dims]) -> Optional[Node]:
        fits = [(t, lead) for t, lead in self.known.lead.items() if _within((*lead, t), within)]
        if not fits:
            return None
        t, lead = self.numbers.choice(fits)
        x = self.value(depth, (*lead, t))
        if t not in x.dims:
            return Node(f"at_end[{t}]({{}})", (x,), (*lead, t))
        form = self.numbers.choice((f"next[{t}]({{}})", f"togo[{t}]({{}}, 0.9)", f"togo[{t}]({{}}, sigmoid({{}}))",
                                    f"discounted({{}}, 0.8)", f"at_end[{t}](sum[{t}]({{}}))"))
        args = (x, self.value(depth, x.dims))[:form.count("{}")]
        return Node(form, args, x.dims if "at_end" not in form else (*lead, t))

    def _op(self, depth: int, within: Optional[Dims]) -> Optional[Node]:
        """A Python op of a text, of numbers, or of a row's numbers."""
        texts = [y for y in self.known.responses if _within(y.dims[:-1], within)]
        if not self.ops or not texts:
            return None
        y = self.numbers.choice(texts)
        lead, kind = y.dims[:-1], self.numbers.choice(("judge", "level", "shrink", "high", "total", "scaled"))
        if kind == "judge":
            return Node(self.numbers.choice((f"judge({y.name}.text)", f"judge({y.name}.text, 5)")), (), lead, cuts=True)
        if kind == "level":
            return Node("level()", cuts=True)
        per_row = kind in ("total", "scaled")
        x = self.value(0, y.dims if per_row else lead)
        if per_row and y.dims[-1] not in x.dims or kind == "scaled" and not _within(x.dims, within):
            return None
        dims = x.dims[:-1] if kind == "total" else x.dims
        return Node(f"{kind}({{}})", (x,), dims, "bool" if kind == "high" else "f32", cuts=True)


def _within(dims: Dims, within: Optional[Dims]) -> bool:
    return within is None or set(dims) <= set(within)
