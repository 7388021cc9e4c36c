"""`-s name=value`: what the command line says instead of the program."""

from __future__ import annotations

from typing import Any, Iterable, Optional

from rlhf_dsl.ast import Span
from rlhf_dsl.checking.context import Context
from rlhf_dsl.diagnostics import did_you_mean, listing

BOOLEANS = {"true": True, "false": False}
RUN_SETTINGS = ("run.steps", "run.epochs", "run.seed", "run.lag")


def report_unknown(cx: Context, dims: Iterable[str], params: Iterable[str]) -> None:
    """Every override must name a dim, a param or a setting of `run:`."""
    known = [*dims, *params, *RUN_SETTINGS]
    for name in cx.tables.overrides:
        if name not in known:
            inside = [setting for setting in known if setting.startswith(f"{name}.")]
            help = f"set one of its lines: {listing(inside, 'or')}" if inside else did_you_mean(name, known)
            cx.tables.sink.error("E0502", name=name, place=f"-s {name}={cx.tables.overrides[name]}", help=help)


def override(cx: Context, name: str, like: Any, span: Optional[Span]) -> Any:
    """The overriding value of `name`, of the type of `like`; `like` itself where there is none; None with a report."""
    text = cx.tables.overrides.get(name)
    if text is None:
        return like
    value = _read(text, like)
    if value is None:
        wanted = {bool: "`true` or `false`", str: "text"}.get(like.__class__, "a number")
        cx.tables.sink.error("E0503", span, name=name, wanted=wanted, value=text, place=f"-s {name}={text}")
    return value


def number(text: str) -> Optional[Any]:
    """A finite number as the language writes it, whole numbers as int; None if it is none."""
    for read in (int, float):
        try:
            value = read(text.replace("_", "?"))
        except ValueError:
            continue
        return value if value - value == 0 else None
    return None


def _read(text: str, like: Any) -> Any:
    if isinstance(like, str):
        return text.strip("\"'") if text[:1] in "\"'" and text[-1:] == text[:1] and len(text) > 1 else text
    return BOOLEANS.get(text.lower()) if isinstance(like, bool) else number(text)
