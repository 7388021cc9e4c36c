"""What is written of an equation: its text, its type, and what the checker will ask of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

Dims = tuple[str, ...]
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Node:
    """form: the text, with a place for each argument; `over`: what a reduction reduces.

    model: whose output this is; cuts: no gradient passes; bound: what a name of an update stands for
    """

    form: str
    args: tuple["Node", ...] = ()
    dims: Dims = ()
    elem: str = "f32"
    over: Dims = ()
    model: str = ""
    cuts: bool = False
    bound: Optional["Node"] = None

    @property
    def text(self) -> str:
        return self.form.format(*(arg.text for arg in self.args))

    @property
    def below(self) -> tuple["Node", ...]:
        return (self.bound,) if self.bound else self.args

    def grad(self, trained: frozenset[str]) -> frozenset[str]:
        """The models among `trained` that it differentiates into, in an update."""
        if self.model:
            return trained & {self.model}
        return NOTHING if self.cuts else NOTHING.union(*(n.grad(trained) for n in self.below))

    def has_statistic(self, model: str, roots: frozenset[str]) -> bool:
        """Whether a gradient of `model` passes through a reduction over rows."""
        if model not in self.grad(frozenset((model,))):
            return False
        return bool(roots & set(self.over)) or any(n.has_statistic(model, roots) for n in self.below)


def number(value: object) -> Node:
    return Node(str(value))


def name(text: str, node: Node, in_update: bool = False) -> Node:
    """A name for a node. What a rollout binds is a constant of the update."""
    return Node(text, (), node.dims, node.elem, bound=node if in_update else None)


@dataclass
class Response:
    """made: "generate", "reply" or "data"."""

    name: str
    dims: Dims
    made: str


@dataclass
class Known:
    """What can be read at a place.

    lead: by ragged dim, the dims that its lengths vary over; pool: parts of what was said so far;
    read: outputs of models that the rollout reads, and their names
    """

    roots: frozenset[str]
    values: list[Node] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    lead: dict[str, Dims] = field(default_factory=dict)
    pool: list[Node] = field(default_factory=list)
    read: list[tuple[Node, Node]] = field(default_factory=list)

    def branch(self) -> "Known":
        """For a section that sees these and adds its own."""
        return Known(self.roots, [*self.values], [*self.responses], dict(self.lead), [*self.pool], [*self.read])
