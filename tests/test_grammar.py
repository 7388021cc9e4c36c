"""The grammar: accepted strictly, its tables are those of the grammar, and trees are what the specification says."""

import json

import pytest

from rlhf_dsl import ast, tables
from rlhf_dsl.ast import strip_spans
from rlhf_dsl.diagnostics import Diagnostics
from rlhf_dsl.format import format_expr
from rlhf_dsl.parser import parse
from rlhf_dsl.source import Source


def program(text: str) -> ast.Program:
    sink = Diagnostics(Source("test.rlflow", text))
    found = parse(sink.source, sink)
    assert not sink.items, sink.items
    return found


def expr(text: str) -> ast.Expr:
    return program(f"param x = {text}").items[0].default


def errors(text: str) -> list[str]:
    sink = Diagnostics(Source("test.rlflow", text))
    parse(sink.source, sink)
    return [d.code for d in sink.sorted()]


# ---- the grammar itself

def test_lark_accepts_it_strictly():
    tables.build(tables.GRAMMAR.read_text(encoding="utf-8"), strict=True)


def test_tables_are_those_of_the_grammar():
    stored = json.loads(tables.TABLES.read_text(encoding="utf-8"))
    grammar = tables.GRAMMAR.read_text(encoding="utf-8")
    assert stored["made_from"] == tables.made_from(grammar), "python -m rlhf_dsl.tables"


def test_stored_tables_parse_as_built_ones_do():
    text = "dim b = 2\nrollout:\n    y[b] = f(1 + 2 ** -x, z=[1, 2]).text\n"
    grammar = tables.GRAMMAR.read_text(encoding="utf-8")
    assert tables.parser().source_path == "<deserialized>"
    assert tables.parser().parse(text) == tables.build(grammar).parse(text)


def test_without_tables_the_parser_is_built_from_the_grammar(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "TABLES", tmp_path / "none.json")
    tables.parser.cache_clear()
    try:
        assert program("dim b = 2").items[0].size.value == 2
    finally:
        tables.parser.cache_clear()


# ---- expressions

@pytest.mark.parametrize("text, same", [
    ("a + b * c ** d", "a + (b * (c ** d))"),
    ("a - b - c", "(a - b) - c"),
    ("a / b * c", "(a / b) * c"),
    ("a ** b ** c", "a ** (b ** c)"),
    ("-a ** b", "-(a ** b)"),
    ("a ** -b", "a ** (-b)"),
    ("-a * b", "(-a) * b"),
    ("not a == b", "not (a == b)"),
    ("not a and b or c", "((not a) and b) or c"),
    ("a + b < c", "(a + b) < c"),
])
def test_precedence(text, same):
    assert strip_spans(expr(text)) == strip_spans(expr(same))


def test_comparisons_chain():
    found = expr("a < b <= c != d")
    assert found.ops == ("<", "<=", "!=") and [o.id for o in found.operands] == list("abcd")


def test_a_call_has_dims_arguments_and_keywords():
    found = expr("quantile[g](x, 0.8, where=m,)")
    assert (found.func.id, [d.id for d in found.subscript.dims]) == ("quantile", ["g"])
    assert found.args[1].value == 0.8 and [(k.name, k.value.id) for k in found.keywords] == [("where", "m")]


def test_methods_and_attributes():
    found = expr("actor.generate(p).text")
    assert found.attr == "text" and found.value.func.attr == "generate"


@pytest.mark.parametrize("text, value", [
    ("64", 64), ("0.5", 0.5), (".5", 0.5), ("1e-4", 1e-4), ("2.", 2.0), ("true", True),
    ('"a\\n\\"b"', 'a\n"b'), ("'it'", "it"), ('"\\d"', "\\d"),
])
def test_literals(text, value):
    found = expr(text).value
    assert found == value and type(found) is type(value)


def test_newlines_and_comments_inside_brackets():
    assert strip_spans(expr("f(  # why\n  a,\n\n  [1,\n2])")) == strip_spans(expr("f(a, [1, 2])"))


# ---- declarations and sections

EVERY_FORM = '''
"""All of it."""
dim b  = 64
dim t <= 32
param eps = 0.2 in (0, 1]
state beta = 0.1 then beta * 2
data q[b], good[b, t], label[b]: bool after q = jsonl("f.jsonl", "prompt", "good", "label")
model actor = policy("x") trained by adamw(lr=1e-4)
from pkg.mod import f, g

fn h(x[t], k):
    """Twice."""
    y = x * k
    return y, x

rollout:
    y[b, t] = actor.generate(q)
    a, c = h(y, 2)
    keep if a > 0, refill=3
    metric m = mean(a)
update(epochs=2, minibatches=4):
    train actor to maximize a
plan:
    actor.train: parallel(tp=2), micro_batch(4)
    assume: prompt=1024
eval(every=20):
    data p[e] = jsonl("g.jsonl")
run:
    steps = 3
    every 50: save(actor), copy(actor, ref)
'''


def test_every_declaration():
    found = program(EVERY_FORM)
    assert found.doc == "All of it."
    b, t, eps, beta, q, actor, imported, h = found.items[:8]
    assert (b.ragged, t.ragged, t.size.value) == (False, True, 32)
    assert (eps.range.low_open, eps.range.high_open) == (True, False)
    assert beta.next.op == "*"
    assert [c.elem for c in q.columns] == ["", "", "bool"] and q.after.id == "q"
    assert actor.role.id == "policy" and actor.optimizer.keywords[0].name == "lr"
    assert imported.module == "pkg.mod" and [n.id for n in imported.names] == ["f", "g"]
    assert (h.doc, len(h.body), len(h.returns)) == ("Twice.", 1, 2)
    assert [f.dims and f.dims[0].id for f in h.formals] == ["t", None]


def test_every_statement():
    rollout, update, plan, evaluation, run = program(EVERY_FORM).items[8:]
    assert [type(s) for s in rollout.body] == [ast.Bind, ast.Bind, ast.Keep, ast.Metric]
    assert [target.name.id for target in rollout.body[1].targets] == ["a", "c"]
    assert [(k.name, k.value.value) for k in update.keywords] == [("epochs", 2), ("minibatches", 4)]
    assert update.body[0].direction == "maximize"
    assert [part.id for part in plan.body[0].target] == ["actor", "train"] and len(plan.body[0].items) == 2
    assert plan.body[1].keywords[0].name == "prompt"
    assert isinstance(evaluation.body[0], ast.Data)
    assert isinstance(run.body[0], ast.Setting) and len(run.body[1].actions) == 2


@pytest.mark.parametrize("word", [
    "log", "data", "mean", "next", "min", "stop", "state", "model", "eval", "keep", "train", "metric", "every", "run",
    "plan", "dim", "param", "fn", "update", "rollout", "by", "trained", "then", "to", "after", "maximize",
])
def test_keywords_are_names_in_expressions_and_on_the_left(word):
    body = program(f"rollout:\n    {word} = {word} + {word}({word}={word}) * {word}.{word}\n").items[0].body
    assert isinstance(body[0], ast.Bind) and body[0].targets[0].name.id == word


def test_spans_cover_what_they_stand_for():
    text = "rollout:\n    a = (x + 1) * f(y)  # why\n"
    source = Source("s", text)
    bind = program(text).items[0].body[0]
    assert source.slice(bind.span) == "a = (x + 1) * f(y)"
    assert source.slice(bind.value.span) == "(x + 1) * f(y)"
    assert source.slice(bind.value.left.span) == "x + 1"
    assert source.slice(bind.value.right.span) == "f(y)"
    assert source.slice(program(text).items[0].head_span) == "rollout"


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment", "   ", "\n   # deep\n"])
def test_nothing_is_a_program(text):
    assert program(text) == ast.Program("", ())


def test_names_of_calls_are_printed_canonically():
    assert format_expr(expr("actor . logprobs( y,temperature = 1 )")) == "actor.logprobs(y, temperature=1)"


# ---- faults

@pytest.mark.parametrize("text", [
    "(" * 5000 + "1" + ")" * 5000, "-" * 5000 + "1", "not " * 5000 + "true", "+".join("1" * 5000),
    "**".join("1" * 3000), "<".join("1" * 3000), "x" + ".y" * 3000,
])
def test_deep_nesting_is_a_diagnostic(text):
    assert errors(f"param a = {text}") == ["E0022"]


def test_errors_are_found_on_every_line():
    assert errors("rollout:\n    a = 1 ^ 2\n    b = (1\n    c = 3 3\nrun\n    steps = 1\n") == [
        "E0012", "E0013", "E0010", "E0011"]
