"""Warnings about names that nothing reads and models that nothing trains."""

from __future__ import annotations

from typing import Iterable

from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.scopes import Scope


def report_unused(cx: Context, scopes: Iterable[Scope]) -> None:
    for binding in (b for scope in scopes for b in scope.names.values()):
        if not binding.used and not binding.quiet:
            cx.error("W0101", binding.span, name=binding.name, help=None if binding.kind == "value" else "take it out")


def report_untrained(cx: Context, trained: frozenset[str]) -> None:
    for model in cx.tables.models.values():
        if model.optimizer is not None and model.name not in trained:
            cx.error("W0103", model.span, name=model.name)
