"""From the text of a program to its syntax tree, with as many syntax errors as it has."""

from __future__ import annotations

from lark import Tree
from lark.exceptions import UnexpectedInput

from rlhf_dsl import ast, tables
from rlhf_dsl.build import build
from rlhf_dsl.diagnostics import Diagnostics
from rlhf_dsl.scan import scan
from rlhf_dsl.source import Source
from rlhf_dsl.syntax_errors import report

MAX_ERRORS = 20
MAX_READ = 200_000  # characters that are read again after errors, in all


def parse(source: Source, sink: Diagnostics) -> ast.Program:
    """The program's tree. After a syntax error (in the sink) it is that of the lines which could be read."""
    return build(_tree(source, sink), sink)


def _tree(source: Source, sink: Diagnostics) -> Tree:
    """Parses; at an error, reports it, takes the line out and parses the rest."""
    lines, read = scan(source.text, sink), 0
    for _ in range(MAX_ERRORS):
        try:
            return tables.parser().parse(lines.visible(source.text))
        except UnexpectedInput as error:
            bad = report(error, lines, sink)
        lines, read = lines.without([bad]), read + lines.lines[bad].end
        if read > MAX_READ:
            break
    return tables.parser().parse("\n")
