"""`rlflowc ops`: the operations that programs may use."""

from __future__ import annotations

from argparse import Namespace
from typing import Iterator

from rlhf_dsl import ast
from rlhf_dsl.builtins import BUILTINS, FIELDS, OPERATIONS
from rlhf_dsl.check import prelude
from rlhf_dsl.diagnostics import did_you_mean, fault
from rlhf_dsl.terminal import put_json

TITLES = {
    "elementwise": "element by element", "choice": "element by element with several arguments, a reduction with one",
    "reduction": "reductions", "ragged": "along a ragged dim", "response": "responses", "field": "of a response",
    "policy": "of a policy", "value": "of a value model", "scorer": "of a scorer", "prelude": "the prelude",
}


def ops_command(args: Namespace) -> int:
    table = list(_entries())
    if args.name is not None:
        table = [entry for entry in table if entry["name"] == args.name.split(".")[-1]]
    if not table:
        names = [entry["name"] for entry in _entries()]
        raise fault("E0004", given=args.name, option="NAME", form="`log`", help=did_you_mean(args.name, names))
    if args.json:
        put_json({"format": "rlflow.ops/1", "ops": table})
    else:
        print(_page(table), end="")
    return 0


def _entries() -> Iterator[dict[str, str]]:
    for builtin in BUILTINS.values():
        yield _entry(builtin.name, builtin.kind, builtin.signature, builtin.meaning)
    for name, meaning in FIELDS.items():
        yield _entry(name, "field", f"y.{name}", meaning)
    for operation in OPERATIONS:
        yield _entry(operation.name, operation.role, operation.signature, operation.meaning)
    for fn in prelude().values():
        yield _entry(fn.name.id, "prelude", _signature(fn), fn.doc)


def _entry(name: str, kind: str, signature: str, meaning: str) -> dict[str, str]:
    return {"name": name, "kind": kind, "signature": signature, "meaning": meaning}


def _signature(fn: ast.Fn) -> str:
    formals = (f.name.id + (f"[{', '.join(d.id for d in f.dims)}]" if f.dims else "") for f in fn.formals)
    return f"{fn.name.id}({', '.join(formals)})"


def _page(table: list[dict[str, str]]) -> str:
    """By kind, each with its meaning below it."""
    parts = []
    for kind, title in TITLES.items():
        entries = [entry for entry in table if entry["kind"] == kind]
        lines = [f"  {entry['signature']}\n      {entry['meaning']}" for entry in entries]
        parts += ["\n".join([f"{title}:", *lines]) + "\n"] if entries else []
    return "\n".join(parts)
