"""One response, one tokenizer: who uses a response must read its tokens as they were made.

Tokenizers are compared where both models' files can be read; what cannot be known before the run is checked by the run.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Optional

from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.python_ops import program_folder
from rlhf_dsl.diagnostics import Label
from rlhf_dsl.typed import Column, Expr, Model

_PREFERENCE = ("policy", "value", "scorer")


def check_tokenizers(cx: Context) -> None:
    """Reports responses that two different tokenizers would read."""
    makers = {id(r.expr): r.model for r in cx.tables.responses.values()}
    for uses in cx.tables.users.values():
        readers = [(model, span) for model, operation, span, _ in uses if operation != "score"]
        response: Expr = uses[0][3]
        maker = cx.tables.models.get(makers.get(id(response), ""))
        first = (maker, response.span) if maker else (readers or [None])[0]
        for model, span in readers:
            if _differ(cx, first[0], model):
                name = response.attr("name") or response.attr("column")
                cx.error("E0306", span, [Label(first[1], f"by the tokenizer of `{first[0].name}`")], response=name,
                         first=first[0].name, second=model.name)
                break


def settle_columns(cx: Context) -> None:
    """Gives each response column the model whose tokenizer reads it: the policy that uses it, else the first user."""
    for uses in cx.tables.users.values():
        response: Expr = uses[0][3]
        if response.op == "data":
            models = [model for model, *_ in uses]
            best = min(models, key=lambda m: _PREFERENCE.index(m.role))
            _settle(cx, response.attr("column"), best.name)


def _settle(cx: Context, column: str, model: str) -> None:
    def settled(c: Column) -> Column:
        return dataclasses.replace(c, policy=model) if c.name == column else c

    cx.tables.data[:] = [dataclasses.replace(d, columns=tuple(map(settled, d.columns))) for d in cx.tables.data]


def _differ(cx: Context, first: Model, second: Model) -> bool:
    if first.source == second.source:
        return False
    folder = str(program_folder(cx.tables.source.path))
    known = [_vocabulary(model.source, folder) for model in (first, second)]
    return None not in known and known[0] != known[1]


@cache
def _vocabulary(source: str, folder: str) -> Optional[str]:
    """What decides how text becomes tokens, from a model's folder; None if it cannot be read here."""
    if not source or ":" in source:
        return None
    files = (Path(folder, source, "tokenizer.json"), Path(source, "tokenizer.json"))
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return json.dumps([content.get("model"), content.get("added_tokens")], sort_keys=True)
    except (OSError, ValueError, AttributeError):
        return None
