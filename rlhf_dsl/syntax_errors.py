"""Says what is wrong with a line that the parser stopped at, in terms of what its author was likely to mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable, Optional

from lark.exceptions import UnexpectedInput

from rlhf_dsl import ast
from rlhf_dsl.ast import Span
from rlhf_dsl.build import STATEMENTS as PLACES
from rlhf_dsl.diagnostics import Diagnostics, closest, listing
from rlhf_dsl.scan import HEADS, Line, Scan, Tok
from rlhf_dsl.syntax_words import (
    DECLARATIONS, FORMS, GLUED, OPERANDS, OPERATORS, PYTHON, SECTIONS, STATEMENTS, TERMINALS,
)

# After one of these an expression may stand.
_BEFORE_EXPRESSIONS = ("=", ":", "if", "maximize", "minimize", "return")


@dataclass(frozen=True)
class _Context:
    """The line that the parser stopped in, and which of its tokens it could not take.

    at: the token's index, len(line.tokens) for the end of the line
    expected: names of the grammar's terminals
    head: the head of the block that the line stands in
    """

    line: Line
    at: int
    expected: frozenset[str]
    head: Optional[Line]
    sink: Diagnostics

    @property
    def in_block(self) -> bool:
        return self.line.indent > 0

    @property
    def in_function(self) -> bool:
        return self.head is not None and self.head.tokens[0].text == "fn"

    @property
    def token(self) -> Optional[Tok]:
        return self.peek(0)

    def peek(self, offset: int) -> Optional[Tok]:
        i = self.at + offset
        return self.line.tokens[i] if 0 <= i < len(self.line.tokens) else None

    @property
    def first(self) -> str:
        return self.line.tokens[0].text

    @property
    def span(self) -> Span:
        return self.token.span if self.token else Span(self.line.end, self.line.end + 1)

    def text(self, offset: int) -> str:
        token = self.peek(offset)
        return token.text if token else ""


def report(error: UnexpectedInput, scan: Scan, sink: Diagnostics) -> int:
    """Puts one diagnostic into the sink; returns the index of the line to leave out."""
    context, index = _locate(error, scan, sink)
    for rule in _RULES:
        if rule(context):
            return index
    _unexpected(context)
    return index


def _locate(error: UnexpectedInput, scan: Scan, sink: Diagnostics) -> tuple[_Context, int]:
    token = getattr(error, "token", None)
    expected = frozenset(getattr(error, "accepts", None) or getattr(error, "expected", None) or error.allowed or ())
    offset = error.pos_in_stream if token is None else token.start_pos
    at_end = token is not None and token.type in ("_NL", "_DEDENT", "_INDENT", "$END")
    visible = [i for i in range(len(scan.lines)) if i not in scan.bad]
    if at_end:  # such a token stands behind the last line read
        before = [i for i in visible if offset is None or scan.lines[i].start < max(offset, 1)]
        index = (before or visible)[-1 if before else 0]
        at = len(scan.lines[index].tokens)
    else:
        index = max(i for i in visible if scan.lines[i].start <= offset)
        at = next(i for i, tok in enumerate(scan.lines[index].tokens) if tok.end > offset)
    line = scan.lines[index]
    head = next((other for other in reversed(scan.lines[:index]) if other.indent < line.indent), None)
    return _Context(line, at, expected, head, sink), index


# ---- rules: each reports what it recognises and says whether it did, the first one wins ---------

def _python(c: _Context) -> bool:
    """A word of Python, where the parser stopped or just before."""
    for token in (c.peek(0), c.peek(-1)):
        if token is not None and token.text in PYTHON and (token.text, c.first) != ("in", "param"):
            break
    else:
        return False
    if (token.text, c.first) in (("if", "keep"), ("import", "from")) or token.text == "return" and c.in_function:
        return False
    c.sink.error("E0019", token.span, word=token.text, instead=PYTHON[token.text])
    return True


def _doubled_operator(c: _Context) -> bool:
    """`a and and b`: the second `and` was taken for a name."""
    if c.text(-1) not in ("and", "or"):
        return False
    c.sink.error("E0010", c.peek(-1).span, found=f"`{c.text(-1)}`", expected="an expression")
    return True


def _bad_number(c: _Context) -> bool:
    """`5abc`, `1.2.3`, `1e`."""
    before = c.peek(-1)
    if c.token is None or c.token.kind not in ("word", "number") or before is None or before.kind != "number":
        return False
    if before.end != c.token.start:
        return False
    c.sink.error("E0023", before.span.to(c.token.span), text=before.text + c.token.text)
    return True


def _glued_operator(c: _Context) -> bool:
    """`+=`, `//`, `=>`: two tokens here, one in another language."""
    for left, right in ((c.peek(-1), c.token), (c.token, c.peek(1))):
        if left is not None and right is not None and left.end == right.start and left.text + right.text in GLUED:
            break
    else:
        return False
    word = left.text + right.text
    c.sink.error("E0019", left.span.to(right.span), word=word, instead=GLUED[word])
    return True


def _starts_nothing(c: _Context) -> bool:
    """The line's first words begin no statement: misspelled, or out of place."""
    if c.at > 1 or c.line.tokens[0].kind != "word":
        return False
    if c.at == 0:
        return _misplaced(c)
    if c.token is None or c.token.kind not in ("word", "number"):
        return False
    return _misplaced(c) if c.first in DECLARATIONS + SECTIONS + STATEMENTS else _unknown_word(c)


def _misplaced(c: _Context) -> bool:
    word = c.first
    at_top = not c.in_block
    if at_top and word in STATEMENTS:
        return _report_place(c, f"`{word}`", "outside of a section", f"it belongs in {_homes(word)}")
    if at_top and c.text(1 - c.at) in ("=", "[", ","):
        allowed = f"bind it in `rollout:`, or declare a constant: `param {word} = ...`"
        return _report_place(c, "a binding", "outside of a section", allowed)
    if not at_top and word in DECLARATIONS + SECTIONS:
        allowed = "declarations and sections begin at column 1"
        return _report_place(c, f"`{word}`", "inside a section or function", allowed)
    if c.in_function and word in STATEMENTS:
        return _report_place(c, f"`{word}`", "inside a function", "a function has bindings and one `return`")
    return _unknown_word(c) if at_top and c.at == 0 else False


def _homes(word: str) -> str:
    kind = {"metric": ast.Metric, "keep": ast.Keep, "train": ast.Train, "every": ast.Every}[word]
    return listing([f"{name}:" for name, kinds in PLACES.items() if kind in kinds], "or")


def _report_place(c: _Context, what: str, where: str, allowed: str) -> bool:
    c.sink.error("E0025", c.line.tokens[0].span, what=what, where=where, allowed=allowed)
    return True


def _unknown_word(c: _Context) -> bool:
    words = STATEMENTS if c.in_block else DECLARATIONS + SECTIONS
    what = "statement" if c.in_block else "declaration or section"
    near = closest(c.first, words)
    known = ("`name = value`, " if c.in_block else "") + listing(words, "or")
    help = f"did you mean `{near}`?" if near else f"write {known}"
    c.sink.error("E0024", c.line.tokens[0].span, word=c.first, what=what, help=help)
    return True


def _expression_alone(c: _Context) -> bool:
    """`f(x)` or `actor.generate(p)` as a statement."""
    if not c.in_block or c.first in FORMS:
        return False
    tokens = c.line.tokens
    called = c.at in (1, 3) and c.text(0) == "(" and all(t.kind == "word" or t.text == "." for t in tokens[:c.at])
    name = c.token is None and tokens[0].kind == "word" and not any(t.text == "=" for t in tokens)
    operation = c.at == 1 and c.token is not None and c.token.kind == "op" and c.token.text not in ("=", ":")
    other = c.at == 0 and tokens[0].kind in ("number", "string", "open_bracket")
    if not (called or name or operation or other):
        return False
    c.sink.error("E0030", Span(c.line.start, c.line.end))
    return True


def _missing_colon(c: _Context) -> bool:
    if "COLON" not in c.expected or c.first not in (*HEADS, "every"):
        return False
    head = c.first if c.token is not None and c.first != "every" else _text(c, c.at)
    end = c.peek(-1).end
    c.sink.error("E0011", Span(end, end + 1), head=head)
    return True


def _text(c: _Context, count: int) -> str:
    """The first tokens of the line, as a reader would write them."""
    words = [t.text for t in c.line.tokens[:count]]
    return " ".join(words) if all(t.isalnum() for t in words) else words[0]


def _body_on_head(c: _Context) -> bool:
    """`run: steps = 1`."""
    if c.first not in HEADS or c.text(-1) != ":" or c.token is None:
        return False
    c.sink.error("E0034", c.span, head=c.first)
    return True


def _no_return(c: _Context) -> bool:
    if "RETURN" not in c.expected or c.token is not None:
        return False
    head = c.head or c.line
    c.sink.error("E0033", Span(head.start, head.end), name=head.tokens[1].text)
    return True


def _equals(c: _Context) -> bool:
    if c.text(0) != "=" or not {"PLUS", "COLON"} & c.expected:
        return False
    if c.in_block and c.at == 3 and c.text(-2) == ".":
        c.sink.error("E0029", Span(c.line.start, c.peek(-1).end))
    else:
        c.sink.error("E0015", c.span)
    return True


def _indexed(c: _Context) -> bool:
    """`y[b]`, `y[0]`, `y[:, 1]` in an expression."""
    opening = _open_square(c)
    if opening is None:
        return False
    i, closed = opening
    before = c.line.tokens[i - 1]
    if before.kind != "word" or not any(t.text in _BEFORE_EXPRESSIONS for t in c.line.tokens[:i]):
        return False
    end = c.peek(-1).end if closed else c.span.end
    c.sink.error("E0031", Span(before.start, end))
    return True


def _open_square(c: _Context) -> Optional[tuple[int, bool]]:
    """The index of a `[` that the parser stopped in, or just behind its `]` (True)."""
    closed = c.text(-1) == "]" and c.text(0) != "("
    depth = 0
    for i in reversed(range(min(c.at, len(c.line.tokens)))):
        kind = c.line.tokens[i].kind
        depth += {"close_bracket": 1, "open_bracket": -1}.get(kind, 0)
        if depth == (0 if closed else -1) and kind == "open_bracket":
            return (i, closed) if c.line.tokens[i].text == "[" and i > 0 else None
    return None


_RULES: tuple[Callable[[_Context], bool], ...] = (
    _python, _doubled_operator, _bad_number, _glued_operator, _starts_nothing, _no_return, _missing_colon,
    _body_on_head, _equals, _indexed, _expression_alone,
)


def _unexpected(c: _Context) -> None:
    """What is there, what could be, and the form of the statement."""
    found = f"`{c.token.text[:40]}`" if c.token else "end of line"
    expected = _describe(c.expected)
    near = closest(c.token.text, (e.lower() for e in c.expected)) if c.token and c.token.kind == "word" else None
    if near:
        help = f"did you mean `{near}`?"
    elif c.first in FORMS and not (c.first == "data" and c.in_block):
        help = f"expected {expected}; the form is {FORMS[c.first]}"
    else:
        help = f"expected {expected}"
    c.sink.error("E0010", c.span, found=found, expected=expected, help=help)


def _describe(expected: Iterable[str]) -> str:
    """Names of terminals in words, operands and operators each as one."""
    left = set(expected) - {"_INDENT", "_DEDENT", "$END"}
    words = []
    if OPERANDS <= left:
        words.append("an expression")
        left -= OPERANDS | {"TRUE", "FALSE", "OPEN_SQUARE", "MINUS", "NOT"}
    if {"PLUS", "TIMES"} <= left:
        words.append("an operator")
        left = {e for e in left - OPERATORS if not e.startswith("__")}
    words += sorted(TERMINALS.get(e, f"`{e.lower()}`") for e in left)
    if len(words) < 2:
        return words[0] if words else "the end of the function"
    return f"{', '.join(words[:-1])} or {words[-1]}"
