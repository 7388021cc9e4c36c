"""The LALR(1) parser, from tables kept beside the grammar: `python -m rlhf_dsl.tables` writes them anew.

Building the tables takes as long as all else that `rlflowc check` does; reading them, a tenth of that. The file holds
a hash of what it was made from: after an edit of the grammar the parser is built from it, slower but never stale.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import lark
from lark.grammar import Rule
from lark.indenter import Indenter
from lark.lexer import TerminalDef

GRAMMAR = Path(__file__).resolve().parent.parent / "grammars" / "rlflow.lark"
TABLES = GRAMMAR.with_suffix(".tables.json")


class _Indent(Indenter):
    NL_type = "_NL"
    OPEN_PAREN_types = ["OPEN", "OPEN_SQUARE"]
    CLOSE_PAREN_types = ["CLOSE", "CLOSE_SQUARE"]
    INDENT_type = "_INDENT"
    DEDENT_type = "_DEDENT"
    tab_len = 4


@functools.cache
def parser() -> lark.Lark:
    """The parser of whole programs; its trees carry positions."""
    grammar = GRAMMAR.read_text(encoding="utf-8")
    stored = _stored_tables()
    if stored.get("made_from") != made_from(grammar):
        return build(grammar)
    tables = stored["tables"] | {"memo": _int_keys(stored["tables"]["memo"])}
    table = tables["data"]["parser"]["parser"]
    table["tokens"] = _int_keys(table["tokens"])
    table["states"] = {int(state): _int_keys(actions) for state, actions in table["states"].items()}
    return lark.Lark._load_from_dict(tables["data"], tables["memo"], postlex=_Indent())


def build(grammar: str, strict: bool = False) -> lark.Lark:
    """The parser built from the grammar's text. `strict` refuses every conflict that Lark would settle by itself."""
    return lark.Lark(
        grammar, parser="lalr", start="program", postlex=_Indent(), propagate_positions=True, maybe_placeholders=True,
        strict=strict,
    )


def write_tables() -> None:
    grammar = GRAMMAR.read_text(encoding="utf-8")
    content = {"made_from": made_from(grammar), "tables": _serialize(build(grammar))}
    TABLES.write_text(json.dumps(content, separators=(",", ":"), default=sorted) + "\n", encoding="utf-8")


def _serialize(built: lark.Lark) -> dict[str, Any]:
    """What `Lark.save` keeps: plain data, but for the option that is given anew at loading."""
    data, memo = built.memo_serialize([TerminalDef, Rule])
    del data["options"]["postlex"]
    return {"data": data, "memo": memo}


def _stored_tables() -> dict[str, Any]:
    try:
        return json.loads(TABLES.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def made_from(grammar: str) -> str:
    """What tables are made from, as a hash."""
    return hashlib.sha256(f"lark {lark.__version__}\n{grammar}".encode()).hexdigest()


def _int_keys(table: dict[str, Any]) -> dict[int, Any]:
    """JSON has no keys but strings."""
    return {int(key): value for key, value in table.items()}


if __name__ == "__main__":
    write_tables()
