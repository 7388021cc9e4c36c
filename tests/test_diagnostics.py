"""Diagnostics: how they are printed, what the table must hold, how they are raised."""

import pickle
import re
import string

import pytest

from rlhf_dsl.ast import Span
from rlhf_dsl.codes import CODES
from rlhf_dsl.diagnostics import (
    Diagnostic, DiagnosticError, Diagnostics, Label, closest, diagnostic, did_you_mean, fault, listing,
)
from rlhf_dsl.frontend import diagnose
from rlhf_dsl.render import MAX_WIDTH, render, to_json
from rlhf_dsl.source import Source

FAMILY = re.compile(r"E0[0-6]\d\d|P0\d\d\d|R0\d\d\d|W0\d\d\d")


def at(source: Source, text: str) -> Span:
    start = source.text.index(text)
    return Span(start, start + len(text))


def shown(text: str, primary: str, labels=(), help: str = "") -> str:
    source = Source("p.rlflow", text)
    made = tuple(Label(at(source, where), note) for where, note in labels)
    return render([Diagnostic("E0202", "error", "wrong", at(source, primary), made, help, source)])


# ---- printing

def test_labels_within_the_primary_span_stand_for_it():
    text = "dim b = 4\n" * 17 + "    kl = actor.logprobs(y) - ref.logprobs(y0)\n"
    whole = "actor.logprobs(y) - ref.logprobs(y0)"
    labels = [("actor.logprobs(y)", "f32[b, t]"), ("ref.logprobs(y0)", "f32[b, s]")]
    assert shown(text, whole, labels, "reduce one") == """\
error[E0202]: wrong
   ┌─ p.rlflow:18:10
   │
18 │     kl = actor.logprobs(y) - ref.logprobs(y0)
   │          -----------------   ---------------- f32[b, s]
   │          │
   │          f32[b, t]
   │
   = help: reduce one
"""


def test_labels_on_other_lines_and_gaps():
    text = "a = 1\nb = 2\nc = 3\n\n\nd = a\n"
    assert shown(text, "d", [("a", "first"), ("b", "second")]) == """\
error[E0202]: wrong
  ┌─ p.rlflow:6:1
  │
1 │ a = 1
  │ - first
2 │ b = 2
  │ - second
  ·
6 │ d = a
  │ ^
"""


def test_three_labels_on_a_line():
    assert shown("f(aa, bb, cc)", "f", [("aa", "one"), ("bb", "two"), ("cc", "three")]) == """\
error[E0202]: wrong
  ┌─ p.rlflow:1:1
  │
1 │ f(aa, bb, cc)
  │ ^ --  --  -- three
  │   │   │
  │   │   two
  │   one
"""


def test_a_span_of_several_lines_is_marked_on_its_first():
    assert shown("x = f(a,\n  b)\n", "f(a,\n  b)") == """\
error[E0202]: wrong
  ┌─ p.rlflow:1:5
  │
1 │ x = f(a,
  │     ^^^^
"""


def test_marks_stand_below_wide_characters_and_tabs():
    assert "1 │     x = \"日本\" + y\n  │                  ^\n" in shown("\tx = \"日本\" + y", "y")


def test_nothing_in_a_source_moves_the_cursor():
    text = shown("x = \"\x1b[2J\r\x07\" + y", "y")
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def test_long_lines_are_cut_around_the_mark():
    lines = shown("x" * 500 + " + y + " + "z" * 500, "y").splitlines()
    assert all(len(line) < MAX_WIDTH + 10 for line in lines)
    assert lines[3][lines[4].index("^")] == "y"


def test_the_end_of_the_text_has_a_place():
    source = Source("p.rlflow", "a = 1\nb =")
    item = diagnostic("E0010", Span(9, 10), source=source, found="end of line", expected="an expression")
    assert render([item]).splitlines()[1:5] == ["  ┌─ p.rlflow:2:4", "  │", "2 │ b =", "  │    ^"]


def test_a_label_in_another_source():
    program, prelude = Source("p.rlflow", "a = gae(x)\n"), Source("prelude.rlflow", "\nfn gae(r, v):\n")
    label = Label(at(prelude, "v"), "needs this", prelude)
    item = Diagnostic("E0202", "error", "wrong", at(program, "gae"), (label,), "", program)
    assert render([item]) == """\
error[E0202]: wrong
  ┌─ p.rlflow:1:5
  │
1 │ a = gae(x)
  │     ^^^
  ┌─ prelude.rlflow:2:11
  │
2 │ fn gae(r, v):
  │           - needs this
"""


def test_places_without_a_source():
    assert render([diagnostic("E0002", place="data/q.jsonl:12", path="x", reason="busy", help="wait")]) == """\
error[E0002]: cannot read `x`: busy
  ┌─ data/q.jsonl:12
  │
  = help: wait
"""
    assert render([diagnostic("E0002", path="x", reason="busy", help="")]) == "error[E0002]: cannot read `x`: busy\n"


def test_colour_changes_nothing_but_colour():
    item = diagnostic("E0012", Span(4, 5), source=Source("p.rlflow", "2 + ^"), labels=[Label(Span(0, 1), "this")])
    coloured = render([item], color=True)
    assert "\x1b[1;31merror[E0012]" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render([item])


def test_json_has_places():
    source = Source("p.rlflow", "\na ^ b\n")
    found = to_json(diagnostic("E0012", at(source, "^"), source=source, labels=[Label(at(source, "a"), "x")]))
    assert found["range"] == {"start": {"line": 2, "column": 3}, "end": {"line": 2, "column": 4}}
    assert (found["path"], found["code"], found["severity"]) == ("p.rlflow", "E0012", "error")
    assert found["labels"][0]["range"]["start"] == {"line": 2, "column": 1}


# ---- collecting and raising

def test_a_sink_keeps_each_once_in_the_order_of_the_text():
    sink = Diagnostics(Source("p.rlflow", "a ^ b ^ c"))
    for start in (6, 2, 6):
        sink.error("E0012", Span(start, start + 1))
    assert [d.span.start for d in sink.sorted()] == [2, 6]
    with pytest.raises(DiagnosticError) as caught:
        sink.raise_errors()
    assert caught.value.exit_code == 1 and len(caught.value.diagnostics) == 2


def test_exit_codes_follow_the_code():
    assert fault("E0001", path="x").exit_code == 2
    assert fault("E0012", Span(0, 1)).exit_code == 1
    assert fault("E0012", Span(0, 1), exit_code=2).exit_code == 2
    assert {CODES[c].exit_code for c in CODES if c[0] == "P"} <= {2, 3}
    assert {CODES[c].exit_code for c in CODES if c[0] == "R"} <= {1, 2, 4}


def test_an_error_crosses_processes():
    error = fault("E0012", Span(1, 2), source=Source("p", "a^b"), exit_code=4)
    again = pickle.loads(pickle.dumps(error))
    assert again.diagnostics == error.diagnostics and again.exit_code == 4


def test_closest_names():
    assert closest("rolout", ["update", "rollout"]) == "rollout"
    assert closest("x", ["update", "rollout"]) is None
    assert did_you_mean("bta", ["beta", "eps"]) == "did you mean `beta`?"
    assert did_you_mean("q", ["beta", "eps"]) == "there is: `beta` and `eps`"
    assert listing(["a", "b", "c"], "or") == "`a`, `b` or `c`"


# ---- the table

@pytest.mark.parametrize("code", CODES.values(), ids=lambda c: c.code)
def test_an_entry_keeps_the_form(code):
    assert FAMILY.fullmatch(code.code)
    assert not code.message.endswith(".") and not code.help.endswith(".")
    assert not code.message[0].isupper() or code.message.split()[0].isupper()
    assert code.explanation.endswith(".")
    words = {name for text in (code.message, code.help) for _, name, _, _ in string.Formatter().parse(text) if name}
    assert all(word.isidentifier() for word in words)


@pytest.mark.parametrize("code", [c for c in CODES.values() if c.wrong], ids=lambda c: c.code)
def test_the_wrong_program_earns_it_and_the_right_one_does_not(code):
    def earned(text: str) -> set[str]:
        sink = Diagnostics(Source("p.rlflow", text))
        diagnose(sink.source, {}, sink)
        return {item.code for item in sink.items}

    assert code.code in earned(code.wrong)
    assert code.code not in earned(code.right)


def test_truth_is_spelled_as_in_the_language():
    found = diagnostic("E0507", name="steps", rule="a whole number of at least 1", value=True)
    assert found.message == "`steps` is a whole number of at least 1, not `true`"
