"""Names: what is bound where, and what may be bound at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterator, Optional

from rlhf_dsl.ast import Span


@dataclass
class Binding:
    """kind: "value", "dim", "param", "state", "column", "model", "fn" or "op".

    payload: the Expr of a value (None: it had an error), the Function of a fn, the typed declaration of the others
    quiet: no warning if it is never used
    """

    kind: str
    name: str
    span: Span
    payload: Any = None
    used: bool = False
    quiet: bool = False


@dataclass
class Scope:
    """A table of names over that of `parent`.

    later: names that this section binds further below, with their places
    elsewhere: names of sections that cannot be seen from here: place and section
    """

    parent: Optional["Scope"] = None
    names: dict[str, Binding] = field(default_factory=dict)
    later: dict[str, Span] = field(default_factory=dict)
    elsewhere: dict[str, tuple[Span, str]] = field(default_factory=dict)

    def find(self, name: str) -> Optional[Binding]:
        return next((s.names[name] for s in self._chain() if name in s.names), None)

    def find_later(self, name: str) -> Optional[Span]:
        return next((s.later[name] for s in self._chain() if name in s.later), None)

    def find_elsewhere(self, name: str) -> Optional[tuple[Span, str]]:
        return next((s.elsewhere[name] for s in self._chain() if name in s.elsewhere), None)

    def visible(self, *kinds: str) -> list[str]:
        """The names that can be used here, of the given kinds or of all."""
        found = {b.name: b for s in reversed(list(self._chain())) for b in s.names.values()}
        return [name for name, b in found.items() if not kinds or b.kind in kinds]

    def _chain(self) -> Iterator["Scope"]:
        scope: Optional[Scope] = self
        while scope is not None:
            yield scope
            scope = scope.parent


KIND_WORDS = {
    "value": "a value", "dim": "a dim", "param": "a param", "state": "a state", "column": "a column of data",
    "model": "a model", "fn": "a function", "op": "a Python op",
}
