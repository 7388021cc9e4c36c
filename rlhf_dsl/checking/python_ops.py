"""Python ops: imports, and calls by their static signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from rlhf_dsl import ast
from rlhf_dsl.checking.calls import Infer
from rlhf_dsl.checking.context import Context
from rlhf_dsl.checking.scopes import Binding
from rlhf_dsl.diagnostics import Label, did_you_mean
from rlhf_dsl.format_expr import format_expr
from rlhf_dsl.ops import SignatureError, annotation_dims, annotation_element, find_module, read_op
from rlhf_dsl.source import STDIN
from rlhf_dsl.typed import Expr, PyOp, Type

TAKES = {"f32": ("f32", "bool"), "bool": ("bool",), "text": ("text",), "list": ("f32", "bool")}


def program_folder(path: str) -> Path:
    """Where relative paths of a program start: its folder; the working directory for standard input."""
    return Path() if path == STDIN else Path(path).parent


def import_ops(cx: Context, node: ast.Import) -> None:
    """Binds the names of `from pkg.mod import f, g`."""
    folder = program_folder(cx.tables.source.path)
    file = find_module(node.module, folder)
    if file is None:
        cx.error("E0601", node.span, module=node.module, folder=str(folder))
    for name in node.names:
        cx.define(Binding("op", name.id, name.span, used=file is None))
        if file is not None:
            _read(cx, name, node.module, file)


def _read(cx: Context, name: ast.Name, module: str, file: Path) -> None:
    try:
        cx.tables.ops[name.id] = read_op(name.id, module, file, name.span)
    except SignatureError as error:
        words = dict(error.words)
        candidates = words.pop("candidates", None)
        help = did_you_mean(name.id, candidates) if candidates else None
        cx.error(error.code, name.span, help=help, **{"file": str(file), **words})


def call_op(cx: Context, node: ast.Call, op: PyOp, infer: Infer) -> Optional[Expr]:
    """A call of a Python op: mapped over the leading dims of its arguments, by name."""
    args = [(arg, infer(cx, arg)) for arg in node.args]
    if node.subscript is not None:
        cx.error("E0114", node.subscript.span, name=op.name)
        return None
    least = len(op.args) - len(op.defaults)
    if node.keywords or not least <= len(args) <= len(op.args):
        given = f"{len(args)}" + (f" and keyword `{node.keywords[0].name}`" if node.keywords else "")
        expected = f"{least} to {len(op.args)}" if op.defaults else len(op.args)
        cx.error("E0608", node.span, name=op.name, takes=_signature(op), expected=expected, given=given)
        return None
    if any(e is None for _, e in args) or not all([_takes(cx, op, i, *arg) for i, arg in enumerate(args)]):
        return None
    dims = _batched_dims(cx, node, op, args) if op.batched else _mapped_dims(cx, node, op, args)
    if dims is None:
        return None
    elem = "f32" if op.result == "list" else op.result
    return cx.expr("pyop", [e for _, e in args], Type(elem, dims), node, name=op.name, id=cx.tables.fresh_id(),
                   keep=cx.keep, text=format_expr(node))


def _signature(op: PyOp) -> str:
    ends = [""] * (len(op.args) - len(op.defaults)) + [f" = {default}" for default in op.defaults]
    return ", ".join(f"{name}: {annotation}{end}" for (name, annotation), end in zip(op.args, ends))


def _takes(cx: Context, op: PyOp, index: int, node: ast.Expr, expr: Expr) -> bool:
    name, annotation = op.args[index]
    element = annotation_element(annotation)
    ragged = cx.ragged(expr.type.dims)
    if expr.type.elem in TAKES[element] and (op.batched or (element == "list") == bool(ragged)):
        return True
    help = None
    if expr.type.elem == "tokens":
        help = f"pass its text, `{getattr(node, 'id', 'y')}.text`"
    elif ragged and element == "f32":
        help = f"reduce `{ragged[0]}`, or let the op take `list[float]`"
    cx.error("E0609", node.span, name=op.name, arg=name, annotation=annotation, found=expr.type, help=help)
    return False


def _mapped_dims(cx: Context, node: ast.Call, op: PyOp, args: list) -> Optional[tuple[str, ...]]:
    """The union of the arguments' dims, less ragged ones; with `-> list[float]`, one value per own token."""
    ragged = {d for _, e in args for d in cx.ragged(e.type.dims)}
    lead = cx.order({d for _, e in args for d in e.type.dims} - ragged)
    if len(cx.roots(lead)) > 1:
        labels = [Label(arg.span, str(e.type)) for arg, e in args]
        cx.error("E0610", node.span, labels, name=op.name, reason="the arguments have different root dims")
        return None
    if op.result != "list":
        return lead
    texts = {e.args[0].type.dims[-1] for _, e in args if e.op == "field" and e.type.elem == "text"}
    found = ragged or texts
    if len(found) != 1:
        reason = f"it gives one value per token {'of one response, but has several' if found else 'of no response'}"
        cx.error("E0610", node.span, name=op.name, reason=reason)
        return None
    dim = found.pop()
    if cx.tables.dims[dim].lead != lead:
        cx.error("E0610", node.span, [Label(arg.span, str(e.type)) for arg, e in args], name=op.name,
                 reason=f"the lengths of `{dim}` do not vary over all dims of the arguments")
        return None
    return (*lead, dim)


def _batched_dims(cx: Context, node: ast.Call, op: PyOp, args: list) -> Optional[tuple[str, ...]]:
    """The dims of a signature stand for the arguments' by name where the names are there, else in order."""
    means: dict[str, str] = {}
    for (_, annotation), (arg, expr) in zip(op.args, args):
        names = annotation_dims(annotation)
        actual = expr.type.dims
        if len(names) != len(actual):
            reason = f"it takes `{annotation}`"
            cx.error("E0610", arg.span, [Label(arg.span, str(expr.type))], name=op.name, reason=reason)
            return None
        pairs = zip(names, names if set(names) == set(actual) else actual)
        clash = next(((n, d) for n, d in pairs if means.setdefault(n, d) != d), None)
        if clash:
            reason = f"its `{clash[0]}` is both `{means[clash[0]]}` and `{clash[1]}`"
            cx.error("E0610", node.span, [Label(arg.span, str(expr.type))], name=op.name, reason=reason)
            return None
    unknown = [d for d in op.result_dims if d not in means]
    if unknown:
        cx.error("E0610", node.span, name=op.name, reason=f"no argument has `{unknown[0]}` of its result")
        return None
    return cx.order(means[d] for d in op.result_dims)
