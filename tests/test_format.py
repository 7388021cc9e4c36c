"""The formatter: canonical, idempotent, keeps every comment and never changes the parsed program."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_dsl import ast
from rlhf_dsl.ast import Span, strip_spans
from rlhf_dsl.commands.fmt import formatted
from rlhf_dsl.diagnostics import DiagnosticError, Diagnostics
from rlhf_dsl.format import format_expr
from rlhf_dsl.parser import parse
from rlhf_dsl.scan import scan
from rlhf_dsl.source import Source

AT = Span()
ROOT = Path(__file__).resolve().parent.parent
PROGRAMS_OF_THE_PROJECT = [*ROOT.glob("programs/*.rlflow"), ROOT / "rlhf_dsl" / "prelude.rlflow"]


def tree(text: str) -> ast.Program:
    sink = Diagnostics(Source("test.rlflow", text))
    found = parse(sink.source, sink)
    assert not sink.items, (text, sink.items)
    return strip_spans(found)


def fmt(text: str) -> str:
    return formatted(Source("test.rlflow", text))


def comments(text: str) -> list[str]:
    spans = scan(text, Diagnostics(Source("test.rlflow", text))).comments
    return sorted(text[s.start:s.end].lstrip("#").strip() for s in spans)


# ---- expressions

NAMES = st.sampled_from(["x", "y", "b", "keep", "data", "log"])
NAME = st.builds(ast.Name, NAMES, st.just(AT))
LEAVES = st.one_of(
    NAME,
    st.builds(ast.Number, st.integers(0, 10**6) | st.floats(0, 1e300, allow_nan=False), st.just(AT)),
    st.builds(ast.Bool, st.booleans(), st.just(AT)),
    st.builds(ast.String, st.text("ab\\\"'\n\t# é", max_size=6), st.just(AT)),
)
DIMS = st.none() | st.builds(ast.Subscript, st.lists(NAME, min_size=1, max_size=2).map(tuple), st.just(AT))


def compare(first, rest):
    return ast.Compare((first, *(operand for _, operand in rest)), tuple(op for op, _ in rest), AT)


def compound(inner):
    keyword = st.builds(ast.Keyword, NAMES, inner, st.just(AT))
    attribute = st.builds(ast.Attribute, inner, NAMES, st.just(AT), st.just(AT))
    keywords = st.lists(keyword, max_size=2, unique_by=lambda k: k.name).map(tuple)
    args = st.lists(inner, max_size=3).map(tuple)
    operators = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    comparisons = st.lists(st.tuples(operators, inner), min_size=1, max_size=2)
    return st.one_of(
        attribute,
        st.builds(ast.List, args, st.just(AT)),
        st.builds(ast.Unary, st.sampled_from(["-", "not"]), inner, st.just(AT)),
        st.builds(ast.Binary, st.sampled_from(["+", "-", "*", "/", "**", "and", "or"]), inner, inner, st.just(AT)),
        st.builds(compare, inner, comparisons),
        st.builds(ast.Call, NAME | attribute, DIMS, args, keywords, st.just(AT)),
    )


EXPRS = st.recursive(LEAVES, compound, max_leaves=12)


@given(EXPRS)
def test_a_printed_expression_parses_to_itself(expr):
    assert tree(f"param p = {format_expr(expr)}").items[0].default == expr


# ---- programs

COMMENT = st.none() | st.text("ab #\"'(é", max_size=8).map(lambda t: f"#{t}")
LEFT = st.sampled_from(["x", "y[b, t]", "a, ret", "long_name_of_a_value", "keep"])


def assignment(head):
    return st.builds(lambda h, e: f"{h}={format_expr(e)}", head, EXPRS)


DECLARATION = st.one_of(
    assignment(NAMES.map("param {}".format)),
    st.sampled_from([
        "dim b=64", "dim t   <=32", "param e = .5 in(0,1]", "param long = 1e-4 in [ 0,2 )", "state s = 1 then s*2",
        "model m = policy( base ) trained   by adamw( lr = 1e-4 )", "data q[b],g[b,t] after q=jsonl( 'f' )",
        "from a.b import f,g",
    ]),
)
STATEMENT = st.one_of(
    assignment(LEFT), assignment(NAMES.map("metric {}".format)),
    EXPRS.map(lambda e: f"keep if {format_expr(e)} , refill=3"))
UPDATE = st.one_of(assignment(LEFT), EXPRS.map(lambda e: f"train m to maximize {format_expr(e)}"))
RUN = st.one_of(st.just("steps=3"), st.just("every  50 : save( m ),copy(m,n)"))
PLAN = st.sampled_from(["m.train:parallel(tp=2),micro_batch(4)", "assume:prompt=3,response=4"])


def body(statement, indent="    "):
    """Statements with comments behind, between, and in any column."""
    line = st.builds(
        lambda s, behind, own, column, blanks: "\n" * blanks + (f"{' ' * column}{own}\n" if own else "")
        + f"{indent}{s}" + (f"  {behind}" if behind else "") + "\n",
        statement, COMMENT, COMMENT, st.integers(0, 6), st.integers(0, 2))
    return st.lists(line, min_size=1, max_size=4).map("".join)


def section(head, statement):
    return body(statement).map(lambda b: f"{head}\n{b}")


PROGRAMS = st.lists(st.one_of(
    body(DECLARATION, ""), section("rollout:", STATEMENT), section("update( epochs=2 ) :  # head", UPDATE),
    section("run:", RUN), section("plan:", PLAN), section("eval(every=2):", assignment(LEFT)),
    body(assignment(LEFT)).map(lambda b: f'fn f(x[t],k):\n    "doc"\n{b}    return x,(k)  # end\n'),
), min_size=1, max_size=4).map("".join)


@settings(max_examples=100, deadline=None)
@given(PROGRAMS, COMMENT)
def test_formatting_keeps_program_and_comments_and_is_idempotent(text, last):
    text += last or ""
    once = fmt(text)
    assert tree(once) == tree(text)
    assert comments(once) == comments(text)
    assert fmt(once) == once


# ---- what it looks like

@pytest.mark.parametrize("before, after", [
    ("dim b=64\ndim t<=32\n", "dim b  = 64\ndim t <= 32\n"),
    ("dim b=64# rows\n", "dim b = 64                        # rows\n"),
    ("param a=1\nparam long=0.5 in(0,1]\nparam c=10 in[0,20)\n",
     "param a    = 1\nparam long = 0.5  in (0, 1]\nparam c    = 10   in [0, 20)\n"),
    ("run:\n  steps=1\n\n\n\n  seed=2\n", "run:\n    steps = 1\n\n    seed = 2\n"),
    ("dim b=1\nrun:\n    steps=1\ndim c=2\n", "dim b = 1\n\nrun:\n    steps = 1\n\ndim c = 2\n"),
    ("param a = f(1,  # why\n  2)\n", "# why\nparam a = f(1, 2)\n"),
    ("'a \"doc\"'\ndim b=1", '"""a \\"doc\\""""\n\ndim b = 1\n'),
    ("param a = ((1))+(2*3)-(4-5)\n", "param a = 1 + 2 * 3 - (4 - 5)\n"),
    ("run:\n    steps=1\n    # in\n# out\n", "run:\n    steps = 1\n    # in\n\n# out\n"),
    ("data a[b]=f()\ndata a[b],c[b]=g()\n", "data a[b] = f()\ndata a[b], c[b] = g()\n"),
    ("", ""),
])
def test_form(before, after):
    assert fmt(before) == after


def test_long_lines_break_inside_brackets():
    x = "a_rather_long_name_of_a_value"
    assert fmt(f"rollout:\n    r = mean(min({x} * b, clip({x}, 1, 2) * c), where={x} > {x})  # why\n") == f"""rollout:
    r = mean(
        min({x} * b, clip({x}, 1, 2) * c),
        where={x} > {x},
    )                             # why
"""


def test_a_long_sum_gets_parentheses():
    x = "a_rather_long_name_of_a_value_of_nothing"
    assert fmt(f"rollout:\n    r = {x} + {x} - {x} * 2\n") == f"""rollout:
    r = (
        {x}
        + {x}
        - {x} * 2
    )
"""


def test_no_line_is_longer_than_it_must_be():
    text = fmt("rollout:\n    r = " + "g(" * 30 + " + ".join(["a_name"] * 40) + ")" * 30 + "\n")
    assert max(len(line) for line in text.splitlines()) <= 160  # thirty levels of indentation alone are 120


@pytest.mark.parametrize("path", sorted(PROGRAMS_OF_THE_PROJECT), ids=lambda path: path.name)
def test_the_projects_programs_are_canonical(path):
    text = path.read_text(encoding="utf-8")
    assert fmt(text) == text


def test_a_program_with_errors_is_not_formatted():
    with pytest.raises(DiagnosticError):
        fmt("dim b = 1\nrun\n    steps = 1\n")
