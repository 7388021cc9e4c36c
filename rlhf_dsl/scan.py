"""The lines of a program before it is parsed: brackets, strings, comments, indentation.

The parser sees only lines that are whole here, so that what is wrong with a bracket, a quote or an indentation is said
about that place; and a line that is wrong is taken out while the others are still checked.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional

from rlhf_dsl.ast import Span
from rlhf_dsl.diagnostics import Diagnostic, Diagnostics, Label, diagnostic
from rlhf_dsl.syntax_words import DECLARATIONS, SECTIONS

MAX_BRACKETS = 60
MAX_TOKENS = 60_000  # beyond it, what no person wrote would take seconds
MAX_UNCLOSED = 10  # statements left out for a bracket or quote; then the rest of the file
_TOP = frozenset(DECLARATIONS + SECTIONS)  # first words of lines at column 1
HEADS = ("rollout", "update", "plan", "eval", "run", "fn")

_TOKEN = re.compile(
    r'''(?P<newline>\n)|(?P<space>[ ]+)|(?P<comment>\#[^\n]*)|(?P<long>""")|(?P<quote>["'])
    |(?P<open>[(\[])|(?P<close>[)\]])
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    |(?P<op>==|!=|<=|>=|\*\*|[-+*/<>=.,:])|(?P<odd>.)''',
    re.VERBOSE | re.DOTALL,
)
_LONG = re.compile(r'"""(?:[^"\\]|\\.|"[^"]|""[^"])*"""', re.DOTALL)
_SHORT = re.compile(r'''"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*\'''')
_CLOSING = {"(": ")", "[": "]"}
_ODD_HELP = {
    **dict.fromkeys("“”„«»", 'strings stand in plain quotes: `"text"`'),
    **dict.fromkeys("‘’‚", "strings stand in plain quotes: `'text'`"),
    **dict.fromkeys("–—−", "minus is the plain `-` of the keyboard"),
    **dict.fromkeys("×·", "times is `*`"),
    **dict.fromkeys("≤≥≠", "comparisons are written `<=`, `>=` and `!=`"),
    "\u00a0": "put a plain space in its place; this one does not break lines",
    "{": "there are no dictionaries or sets; lists are written `[a, b]`",
    "}": "there are no dictionaries or sets; lists are written `[a, b]`",
    ";": "a statement ends where its line ends; write one a line",
    "&": "the logical operators are `and`, `or` and `not`",
    "|": "the logical operators are `and`, `or` and `not`",
    "!": "the logical operators are `and`, `or` and `not`",
    "%": "the operators are `+`, `-`, `*`, `/` and `**`",
    "@": "the operators are `+`, `-`, `*`, `/` and `**`; there are no matrices and no decorators",
    "\\": "a line goes on inside brackets; put the expression into parentheses",
}


@dataclass(frozen=True)
class Tok:
    """kind: a group of `_TOKEN`, or "string"."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def span(self) -> Span:
        return Span(self.start, self.end)


@dataclass(frozen=True)
class Line:
    """A logical line: more than one in the file where brackets or strings are open at a line's end."""

    indent: int
    tokens: tuple[Tok, ...]
    start: int
    end: int

    @property
    def opens_block(self) -> bool:
        return self.tokens[-1].text == ":"


@dataclass(frozen=True)
class Scan:
    """`bad` holds the indices of the lines that the parser must not see."""

    lines: tuple[Line, ...]
    comments: tuple[Span, ...]
    bad: frozenset[int]

    def without(self, more: Iterable[int]) -> "Scan":
        """Also without these lines, what stands in their blocks, and heads of which nothing is left."""
        return Scan(self.lines, self.comments, _closure(self.lines, self.bad | set(more)))

    def visible(self, text: str) -> str:
        """The text with blanks for the bad lines, every offset as it was; ends in a newline. Nothing without lines."""
        if not self.lines:
            return "\n"
        return _blank(text, (Span(line.start, line.end) for line in (self.lines[i] for i in self.bad))) + "\n"


def scan(text: str, sink: Diagnostics) -> Scan:
    """Cuts a text into logical lines and reports those that are not whole."""
    excess = next(itertools.islice(_tokens(text), MAX_TOKENS, None), None)
    if excess is not None:
        sink.error("E0035", excess.span)
        return Scan((), (), frozenset())
    left_out: list[Span] = []
    scanner = _Scanner(text, sink)
    while scanner.unclosed is not None:  # a bracket or quote swallows the rest: leave its statement out and look again
        sink.add(scanner.unclosed_fault)
        rest = Span(scanner.unclosed.start, len(text))
        left_out.append(scanner.unclosed if len(left_out) < MAX_UNCLOSED else rest)
        scanner = _Scanner(_blank(text, left_out), sink)
    for found in scanner.faults.values():
        sink.add(found)
    lines = tuple(sorted([*scanner.lines, *(_as_line(text, span) for span in left_out)], key=lambda line: line.start))
    bad = {i for i, line in enumerate(lines) if line.start in scanner.faults or Span(line.start, line.end) in left_out}
    bad |= _check_layout(lines, bad, sink)
    return Scan(lines, tuple(scanner.comments), frozenset()).without(bad)


class _Scanner:
    """One pass over a text.

    faults: the first fault of each line, by the line's start
    unclosed: the statement to leave out before the next pass, None if there is none, and what is wrong with it
    """

    def __init__(self, text: str, sink: Diagnostics):
        self.text, self.source = text, sink.source
        self.lines: list[Line] = []
        self.comments: list[Span] = []
        self.faults: dict[int, Diagnostic] = {}
        self.unclosed: Optional[Span] = None
        self.unclosed_fault: Optional[Diagnostic] = None
        self._tokens: list[Tok] = []
        self._open: list[tuple[Tok, bool]] = []  # True: a range, which may close with the other bracket
        self._run()

    def _run(self) -> None:
        for token in _tokens(self.text):
            handler = getattr(self, f"_{token.kind}", self._keep)
            handler(token)
            if self.unclosed is not None:
                return
        if self._open:
            opened = self._open[0][0]
            self._leave_out("E0013", opened, bracket=opened.text, close=_CLOSING[opened.text])
            return
        self._end_line()

    def _keep(self, token: Tok) -> None:
        self._tokens.append(token)

    def _space(self, token: Tok) -> None:
        pass

    def _comment(self, token: Tok) -> None:
        self.comments.append(token.span)

    def _newline(self, token: Tok) -> None:
        if not self._open:
            self._end_line()

    def _end_line(self) -> None:
        if not self._tokens:
            return
        start = self._tokens[0].start
        indent = _indent(self.text, self.text.rfind("\n", 0, start) + 1)
        self.lines.append(Line(indent, tuple(self._tokens), start, self._tokens[-1].end))
        self._tokens = []

    def _string(self, token: Tok) -> None:
        self._tokens.append(token)

    def _open_bracket(self, token: Tok) -> None:
        is_range = bool(self._tokens) and self._tokens[-1].text == "in"  # `in (0, 1]`
        self._tokens.append(token)
        self._open.append((token, is_range))
        if len(self._open) > MAX_BRACKETS:
            self._fault("E0022", token.span)

    def _close_bracket(self, token: Tok) -> None:
        self._tokens.append(token)
        if not self._open:
            self._fault("E0014", token.span, bracket=token.text)
            return
        opened, is_range = self._open.pop()
        if _CLOSING[opened.text] != token.text and not is_range:
            label = Label(opened.span, "opened here")
            self._fault("E0032", token.span, labels=[label], bracket=token.text, close=_CLOSING[opened.text])

    def _odd(self, token: Tok) -> None:
        self._tokens.append(token)
        if token.text == "^":
            self._fault("E0012", token.span)
        elif token.text == "\t":
            self._fault("E0016", token.span)
        else:
            shown = token.text if token.text.isprintable() else f"U+{ord(token.text):04X}"
            self._fault("E0021", token.span, help=_ODD_HELP.get(token.text), char=shown)

    def _unterminated(self, token: Tok) -> None:
        """A quote without its partner: the rest of the line is the string."""
        self._tokens.append(token)
        if token.text.startswith('"""'):
            self._leave_out("E0020", token, quote='"""')
        else:
            self._fault("E0020", token.span, quote=token.text[0])

    def _leave_out(self, code: str, token: Tok, **words) -> None:
        self.unclosed = _statement(self.text, token.start)
        self.unclosed_fault = diagnostic(code, token.span, source=self.source, **words)

    def _fault(self, code: str, span: Span, **words) -> None:
        """Keeps the first fault of a line."""
        line = self._tokens[0].start if self._tokens else span.start
        if line not in self.faults:
            self.faults[line] = diagnostic(code, span, source=self.source, **words)


def _tokens(text: str, at: int = 0) -> Iterator[Tok]:
    while at < len(text):
        found = _TOKEN.match(text, at)
        kind, end = found.lastgroup, found.end()
        if kind in ("long", "quote"):
            whole = (_LONG if kind == "long" else _SHORT).match(text, at)
            end = whole.end() if whole else _end_of_line(text, at)
            kind = "string" if whole else "unterminated"
        kind = {"open": "open_bracket", "close": "close_bracket"}.get(kind, kind)
        yield Tok(kind, text[at:end], at)
        at = end


def first_string(text: str, at: int) -> Span:
    """The first string that starts at or after an offset, which must not stand inside another."""
    return next(token.span for token in _tokens(text, at) if token.kind == "string")


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _statement(text: str, at: int) -> Span:
    """The line at an offset and the deeper ones below it: what its author is likely to have meant as one statement."""
    start = text.rfind("\n", 0, at) + 1
    indent = _indent(text, start)
    end = _end_of_line(text, at)
    while end < len(text):
        following = _end_of_line(text, end + 1)
        line = text[end + 1:following]
        if line.strip() and _indent(text, end + 1) <= indent:
            break
        end = following
    return Span(start, end)


def _indent(text: str, start: int) -> int:
    return re.compile("[ \\t]*").match(text, start).end() - start


def _blank(text: str, spans: Iterable[Span]) -> str:
    for span in spans:
        text = text[:span.start] + re.sub(r"[^\n]", " ", text[span.start:span.end]) + text[span.end:]
    return text


def _as_line(text: str, span: Span) -> Line:
    """What was left out, as a line of its own for the layout."""
    first = next(token for token in _tokens(text[span.start:span.end]) if token.kind != "space")
    token = Tok(first.kind, first.text, span.start + first.start)
    return Line(token.start - span.start, (token,), span.start, span.end)


# ---- indentation -------------------------------------------------------------------------------

def _check_layout(lines: tuple[Line, ...], bad: set[int], sink: Diagnostics) -> set[int]:
    """Reports blocks without a head, heads without a block, and lines between two levels; returns all their indices."""
    found: set[int] = set()
    levels = [0]
    for i, line in enumerate(lines):
        if i in found:
            continue
        after_head = i > 0 and lines[i - 1].opens_block
        if line.indent > levels[-1] and not after_head:
            found |= _orphans(lines, i, i in bad or i - 1 in bad | found, sink)
            continue
        if line.indent <= levels[-1] and after_head:
            found |= _empty(lines, i - 1, bad, sink)
        outer = [level for level in levels if level <= line.indent]
        if line.indent > levels[-1]:
            outer.append(line.indent)
        if outer[-1] == line.indent:
            levels = outer
            continue
        if i not in bad and not (i - 1 in found and lines[i - 1].indent == line.indent):
            sink.error("E0018", Span(line.start, line.end), what="does not match any line above it")
        found.add(i)
    if lines and lines[-1].opens_block:
        found |= _empty(lines, len(lines) - 1, bad, sink)
    return found


def _empty(lines: tuple[Line, ...], i: int, bad: set[int], sink: Diagnostics) -> set[int]:
    """A head below which nothing stands, and the lines that were to stand there but are not deeper than it."""
    end = i + 1
    while end < len(lines) and lines[end].indent == lines[i].indent and lines[end].tokens[0].text not in _TOP:
        end += 1
    if i not in bad:
        below = [Span(line.start, line.end) for line in lines[i + 1:end]]
        meant = [Label(span, "is it meant to stand in it?") for span in below[:1]]
        sink.error("E0017", lines[i].tokens[-1].span, labels=meant, head=lines[i].tokens[0].text)
    return set(range(i, end))


def _orphans(lines: tuple[Line, ...], i: int, excused: bool, sink: Diagnostics) -> set[int]:
    """Lines deeper than the one above, which opens no block: its colon is missing, or they are out of place."""
    before = lines[i - 1] if i else None
    block = set(_block(lines, i - 1)) if i else {0, *_block(lines, 0)}
    if excused:
        return block
    if before is not None and before.tokens[0].text in HEADS:
        sink.error("E0011", Span(before.end, before.end + 1), head=before.tokens[0].text)
        return block | {i - 1}
    sink.error("E0018", Span(lines[i].start, lines[i].end), what="is deeper than the line above, which opens no block")
    return block


def _closure(lines: tuple[Line, ...], bad: set[int]) -> frozenset[int]:
    """`bad`, what stands in blocks of bad heads, and heads whose whole block is bad."""
    found = set(bad)
    for i in range(len(lines)):
        if i in found:
            found.update(_block(lines, i))
    for i in reversed(range(len(lines))):
        block = _block(lines, i)
        if block and found.issuperset(block):
            found.add(i)
    return frozenset(found)


def _block(lines: tuple[Line, ...], head: int) -> range:
    """The indices of the lines deeper than `head` that follow it."""
    end = head + 1
    while end < len(lines) and lines[end].indent > lines[head].indent:
        end += 1
    return range(head + 1, end)
