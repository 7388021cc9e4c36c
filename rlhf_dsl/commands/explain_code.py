"""`rlflowc help CODE`: what a diagnostic means, with a program that earns it."""

from __future__ import annotations

import re
import textwrap
from argparse import Namespace

from rlhf_dsl.codes import CODES, Code
from rlhf_dsl.diagnostics import did_you_mean, fault

FAMILIES = {
    "E00": "reading and syntax", "E01": "names", "E02": "dims and types", "E03": "models and roles", "E04": "training",
    "E05": "params and settings", "E06": "Python ops", "P0": "planning", "R0": "running", "W0": "warnings",
}


def help_command(args: Namespace) -> int:
    if args.code is None:
        print(_overview(), end="")
        return 0
    entry = CODES.get(args.code.upper())
    if entry is None:
        raise fault("E0004", given=args.code, option="CODE", form="`E0202`", help=did_you_mean(args.code.upper(), CODES)
                    if len(args.code) > 3 else "`rlflowc help` lists all codes")
    print(_page(entry), end="")
    return 0


def _words(template: str) -> str:
    """A template with an ellipsis for each word to be filled in."""
    return re.sub(r"{\w+}", "…", template)


def _overview() -> str:
    """All codes, by family."""
    parts = []
    for prefix, title in FAMILIES.items():
        entries = [entry for code, entry in CODES.items() if code.startswith(prefix)]
        lines = [f"  {entry.code}  {_words(entry.message)}" for entry in entries]
        parts += ["\n".join([f"{title}:", *lines]) + "\n"] if entries else []
    return "\n".join(parts)


def _page(entry: Code) -> str:
    parts = [f"{entry.severity}[{entry.code}]: {_words(entry.message)}", textwrap.fill(entry.explanation, 100)]
    if _words(entry.help).strip("…"):
        parts.append(textwrap.fill(f"help: {_words(entry.help)}", 100))
    for title, program in (("Earns it:", entry.wrong), ("Does not:", entry.right)):
        if program:
            parts.append(f"{title}\n\n{textwrap.indent(program.rstrip(), '    ')}")
    return "\n\n".join(part for part in parts if part) + "\n"
