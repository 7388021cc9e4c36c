"""Python ops: the `@op` mark for users, and the reading of signatures from source without importing anything.

    @op
    def exact_match(response: str, answer: str) -> float: ...

    @op(batched=True, timeout=30)
    def diversity(responses: Text["b g"]) -> F32["b g"]: ...
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional, Union

from rlhf_dsl.ast import Span
from rlhf_dsl.typed import PyOp

SCALARS = {"str": "text", "float": "f32", "int": "f32", "bool": "bool"}
PER_TOKEN = "list[float]"
BATCHED = {"Text": "text", "F32": "f32", "Bool": "bool"}
DEFAULT_TIMEOUT = 60.0
_MARK = "__rlflow_op__"


@dataclass(frozen=True)
class OpOptions:
    """timeout: seconds for one call. on_error: "fail", or the value that stands in for the failed row's result."""

    batched: bool = False
    timeout: float = DEFAULT_TIMEOUT
    on_error: Union[float, bool, str] = "fail"


class _Batched:
    """`Text["b g"]`: in a batched op, nested lists over the named dims."""

    def __class_getitem__(cls, dims: str) -> str:
        return f"{cls.__name__}[{dims!r}]"


class Text(_Batched):
    """Nested lists of str."""


class F32(_Batched):
    """Nested lists of float."""


class Bool(_Batched):
    """Nested lists of bool."""


def op(function: Optional[Callable] = None, *, batched: bool = False, timeout: float = DEFAULT_TIMEOUT,
       on_error: Union[float, bool, str] = "fail") -> Callable:
    """Marks a function that programs may import. It runs in a worker process, mapped over rows unless `batched`.

    batched: the function sees whole groups: its arguments are nested lists over the dims of their annotations
    timeout: seconds until a call counts as failed
    on_error: "fail" ends the run; any other value stands in for the result of a row that raises, hangs or is NaN
    """
    def mark(target: Callable) -> Callable:
        setattr(target, _MARK, OpOptions(batched, timeout, on_error))
        return target

    return mark if function is None else mark(function)


def options_of(function: Callable) -> Optional[OpOptions]:
    """What `@op` said of a function, None if it is not marked."""
    return getattr(function, _MARK, None)


class SignatureError(Exception):
    """A signature that programs cannot use; `code` and `words` make its diagnostic."""

    def __init__(self, code: str, **words):
        self.code = code
        self.words = words
        super().__init__(code)


# ---- finding ---------------------------------------------------------------------------------------

def find_module(module: str, folder: Path) -> Optional[Path]:
    """The file of a module, next to the program first, then as installed; nothing is imported, parents neither."""
    parts = module.split(".")
    return _below(folder, parts) or _installed(parts)


def _below(folder: Path, parts: list[str]) -> Optional[Path]:
    stem = folder.joinpath(*parts)
    files = (stem.parent / f"{stem.name}.py", stem / "__init__.py")
    return next((f for f in files if f.is_file()), None)


def _installed(parts: list[str]) -> Optional[Path]:
    spec = importlib.machinery.PathFinder.find_spec(parts[0], [p or "." for p in sys.path])
    if spec is None:
        return None
    if len(parts) == 1:
        return Path(spec.origin) if (spec.origin or "").endswith(".py") else None
    folders = spec.submodule_search_locations or ()
    return next((f for f in (_below(Path(folder), parts[1:]) for folder in folders) if f), None)


# ---- reading ---------------------------------------------------------------------------------------

def read_op(name: str, module: str, file: Path, span: Span = Span()) -> PyOp:
    """The signature of function `name` in `file`, as its source says. Raises SignatureError."""
    tree = _parse(file, module)
    found = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name]
    if not found:
        marked = _marked(tree)
        raise SignatureError("E0602", name=name, module=module, file=str(file), candidates=marked)
    function = found[-1]
    mark = _mark_of(function, _op_names(tree))
    if mark is None or isinstance(function, ast.AsyncFunctionDef):
        raise SignatureError("E0603", name=name, module=module, line=function.lineno, file=str(file))
    options = _options(mark, name)
    args = _arguments(function, options.batched)
    result = _annotation(function, "return", function.returns, options.batched)
    on_error = None if options.on_error == "fail" else options.on_error
    return PyOp(name, module, str(file), function.lineno, args, annotation_element(result), options.batched,
                options.timeout, on_error, span, annotation_dims(result), _defaults(function))


def annotation_element(annotation: str) -> str:
    """The element of an annotation: "f32", "bool", "text", or "list" for one f32 per own token."""
    if annotation == PER_TOKEN:
        return "list"
    head, _, _ = annotation.partition("[")
    return SCALARS.get(annotation) or BATCHED[head]


def annotation_dims(annotation: str) -> tuple[str, ...]:
    """The dims of a batched annotation: ("b", "g") of `Text["b g"]`."""
    _, bracket, rest = annotation.partition("[")
    return tuple(rest.rstrip("]").strip("'\"").split()) if bracket and annotation != PER_TOKEN else ()


def _parse(file: Path, module: str) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError, OSError) as error:
        line = getattr(error, "lineno", None) or 1
        raise SignatureError("E0607", module=module, place=f"{file}:{line}", reason=_reason(error)) from error


def _reason(error: Exception) -> str:
    return getattr(error, "msg", None) or getattr(error, "strerror", None) or str(error)


def _op_names(tree: ast.Module) -> set[str]:
    """The names under which the module knows `op`."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in ("rlhf_dsl", "rlhf_dsl.ops"):
            names |= {a.asname or a.name for a in node.names if a.name == "op"}
        if isinstance(node, ast.Import):
            names |= {f"{a.asname or a.name}.op" for a in node.names if a.name in ("rlhf_dsl", "rlhf_dsl.ops")}
    return names


def _mark_of(function: ast.FunctionDef, names: set[str]) -> Optional[ast.expr]:
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(target) in names:
            return decorator
    return None


def _marked(tree: ast.Module) -> tuple[str, ...]:
    names = _op_names(tree)
    return tuple(n.name for n in tree.body if isinstance(n, ast.FunctionDef) and _mark_of(n, names) is not None)


def _options(mark: ast.expr, name: str) -> OpOptions:
    if not isinstance(mark, ast.Call):
        return OpOptions()
    values = {}
    for keyword in mark.keywords:
        if keyword.arg not in OpOptions.__dataclass_fields__:
            raise SignatureError("E0606", name=name, option=keyword.arg or "**", line=mark.lineno)
        values[keyword.arg] = _literal(keyword, name)
    options = OpOptions(**values)
    seconds = options.timeout
    if not isinstance(options.batched, bool):
        raise SignatureError("E0606", name=name, option="batched", line=mark.lineno)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise SignatureError("E0606", name=name, option="timeout", line=mark.lineno)
    return options


def _literal(keyword: ast.keyword, name: str):
    try:
        return ast.literal_eval(keyword.value)
    except ValueError as error:
        raise SignatureError("E0606", name=name, option=keyword.arg, line=keyword.value.lineno) from error


def _arguments(function: ast.FunctionDef, batched: bool) -> tuple[tuple[str, str], ...]:
    spec = function.args
    if spec.vararg or spec.kwarg or None in spec.kw_defaults:
        raise SignatureError("E0604", name=function.name, arg="*", line=function.lineno)
    return tuple((a.arg, _annotation(function, a.arg, a.annotation, batched)) for a in [*spec.posonlyargs, *spec.args])


def _defaults(function: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(ast.unparse(default) for default in function.args.defaults)


def _annotation(function: ast.FunctionDef, arg: str, node: Optional[ast.expr], batched: bool) -> str:
    if node is None:
        raise SignatureError("E0604", name=function.name, arg=arg, line=function.lineno)
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)
    text = text.replace("List[", "list[").replace("'", '"')
    if (_is_batched(text) if batched else text in SCALARS or text == PER_TOKEN):
        return text
    raise SignatureError("E0605", name=function.name, arg=arg, annotation=text, line=node.lineno)


def _is_batched(text: str) -> bool:
    head, bracket, rest = text.partition("[")
    dims = rest.rstrip("]").strip("'\"").split()
    return head in BATCHED and bool(bracket) and bool(dims) and all(d.isidentifier() for d in dims)
