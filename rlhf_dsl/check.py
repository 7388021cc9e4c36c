"""The checker: from a syntax tree to a program with a meaning, or to diagnostics."""

from __future__ import annotations

from functools import cache
from typing import Optional

from rlhf_dsl import ast
from rlhf_dsl.builtins import PRELUDE_PATH, prelude_text
from rlhf_dsl.checking import declarations, sections, states
from rlhf_dsl.checking.context import Context, Tables
from rlhf_dsl.checking.data import data, root_dims
from rlhf_dsl.checking.functions import Function
from rlhf_dsl.checking.overrides import report_unknown
from rlhf_dsl.checking.plan_section import plan
from rlhf_dsl.checking.python_ops import import_ops
from rlhf_dsl.checking.run_section import run
from rlhf_dsl.checking.scopes import Binding, Scope
from rlhf_dsl.checking.tokenizers import check_tokenizers, settle_columns
from rlhf_dsl.checking.unused import report_unused, report_untrained
from rlhf_dsl.diagnostics import Diagnostics, Label
from rlhf_dsl.parser import parse
from rlhf_dsl.source import Source
from rlhf_dsl.typed import Checked, Eval, State, Update

SECTIONS = ("rollout", "update", "eval", "plan", "run")
ONCE = ("rollout", "plan", "run")


def check(program: ast.Program, source: Source, overrides: dict[str, str], sink: Diagnostics) -> Optional[Checked]:
    """The checked program, or None if it has errors; all errors and warnings are in `sink`.

    overrides: `-s name=value` of the command line, as text, by name
    """
    tables = Tables(source, sink, dict(overrides))
    tables.prelude = Scope(names={name: Binding("fn", name, fn.name.span, payload=None, used=True, quiet=True)
                                  for name, fn in prelude().items()})
    for name, fn in prelude().items():
        tables.prelude.names[name].payload = Function(fn, tables.prelude, prelude_source())
    cx = Context(tables, Scope(parent=tables.prelude))
    return _Check(cx, program).result()


@cache
def prelude_source() -> Source:
    return Source(PRELUDE_PATH.name, prelude_text())


@cache
def prelude() -> dict[str, ast.Fn]:
    """The functions of the prelude by name."""
    sink = Diagnostics(prelude_source())
    found = {item.name.id: item for item in parse(prelude_source(), sink).items if isinstance(item, ast.Fn)}
    sink.raise_errors()
    return found


class _Check:
    """The order of the work: what a step needs is found out by the steps before it."""

    def __init__(self, cx: Context, program: ast.Program):
        self.cx = cx
        self.program = program
        self.sections = {kind: self._of_kind(kind) for kind in SECTIONS}
        self.scopes: list[Scope] = [cx.scope]

    def result(self) -> Optional[Checked]:
        self._declare()
        inits = {node: states.initial(self.cx, node) for node in self._items(ast.State)}
        rolled, rollout = self._rollout()
        found_states = self._states(rolled, inits)
        updates = self._updates(rolled)
        evals = self._evals()
        self._separate_data(rolled, rollout, updates, evals)
        constraints = plan(self.cx, self.sections["plan"][0]) if self.sections["plan"] else ()
        settings = run(self.cx, self.sections["run"][0] if self.sections["run"] else None)
        self._warn()
        tables = self.cx.tables
        if tables.sink.has_errors:
            return None
        settle_columns(self.cx)
        warnings = tuple(d for d in tables.sink.sorted() if d.severity == "warning")
        return Checked(
            tables.source.stem, tables.source.path, tables.source.text, self.program.doc, tables.dims, tables.params,
            found_states, tuple(tables.data), tables.models, tables.ops, tuple(rollout), tuple(updates), tuple(evals),
            constraints, settings, warnings)

    # ---- declarations

    def _items(self, kind) -> list:
        return [item for item in self.program.items if isinstance(item, kind)]

    def _of_kind(self, kind: str) -> list[ast.Section]:
        return [s for s in self._items(ast.Section) if s.kind == kind]

    def _declare(self) -> None:
        """Binds all top-level names; params see the dims and params above them only."""
        cx, roots = self.cx, root_dims(self.program)
        dims, params = self._items(ast.Dim), self._items(ast.Param)
        report_unknown(cx, [d.name.id for d in dims], [p.name.id for p in params])
        cx.scope.later.update({p.name.id: p.name.span for p in reversed(params)})
        for node in dims:
            declarations.dim(cx, node, roots)
        for node in self._items(ast.State):
            cx.define(Binding("state", node.name.id, node.name.span))
        for node in self._items(ast.Fn):
            cx.define(Binding("fn", node.name.id, node.name.span, Function(node, cx.scope, None)))
        for node in self._items(ast.Import):
            import_ops(cx, node)
        for node in params:
            declarations.param(cx, node)
        for node in self._items(ast.Data):
            data(cx, node)
        for node in self._items(ast.Model):
            declarations.model(cx, node)
        for kind in ONCE:
            for again in self.sections[kind][1:]:
                cx.error("E0116", again.head_span, [Label(self.sections[kind][0].head_span, "first")], section=kind)

    # ---- sections

    def _others(self, section: Optional[ast.Section], *kinds: str) -> list[ast.Section]:
        return [s for kind in kinds for s in self.sections[kind] if s is not section]

    def _rollout(self) -> tuple[Context, list]:
        section = next(iter(self.sections["rollout"]), None) or ast.Section("rollout", (), (), ast.Span(), ast.Span())
        keeps = sum(isinstance(line, ast.Keep) for line in section.body)
        others = self._others(section, "update", "eval")
        cx = sections.enter(self.cx, section, self.cx.scope, others, phase="rollout", last_keep=keeps)
        self.scopes.append(cx.scope)
        return sections.rollout(cx, section)

    def _states(self, rolled: Context, inits: dict) -> dict[str, State]:
        found = {node.name.id: states.following(rolled, node, init) for node, init in inits.items() if init is not None}
        known = {name: state for name, state in found.items() if state is not None}
        states.report_cycles(self.cx, known)
        return known

    def _updates(self, rolled: Context) -> list[Update]:
        updates, changed = [], frozenset()
        for index, section in enumerate(self.sections["update"]):
            others = self._others(section, "update", "eval")
            cx = sections.enter(rolled, section, rolled.scope, others, phase=f"update{index}", changed=changed)
            self.scopes.append(cx.scope)
            updates.append(sections.update(cx, section, index))
            changed |= sections.trained_models(cx, section.body)
        return updates

    def _evals(self) -> list[Eval]:
        evals = []
        for index, section in enumerate(self.sections["eval"]):
            others = self._others(section, "rollout", "update", "eval")
            cx = sections.enter(self.cx, section, self.cx.scope, others, phase=f"eval{index}")
            self.scopes.append(cx.scope)
            evals.append(sections.evaluation(cx, section, index))
        return evals

    def _separate_data(self, rolled: Context, rollout: list, updates: list[Update], evals: list[Eval]) -> None:
        """Rows of an evaluation are not those of a stream."""
        streamed = set(sections.roots_read(rolled, map(sections.expr_of, rollout))).union(*(u.roots for u in updates))
        for root in dict.fromkeys(root for e in evals for root in e.roots if root in streamed):
            source = next(d for d in self.cx.tables.data if d.root == root)
            self.cx.error("E0224", source.span, dim=root)

    def _warn(self) -> None:
        """What an expression with an error would have used is not known, so that warnings wait until there is none."""
        check_tokenizers(self.cx)
        if self.cx.tables.sink.has_errors:
            return
        trained = frozenset(name for s in self.sections["update"] for name in sections.trained_models(self.cx, s.body))
        report_untrained(self.cx, trained)
        report_unused(self.cx, self.scopes)
