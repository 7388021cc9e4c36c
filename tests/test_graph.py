"""`rlflowc graph`: what each format shows, where a picture's parts stand, and what the command line does.

    python -m tests.test_graph

writes the golden files of today into tests/golden/graph: read the difference before you keep it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.compile import compile_program, lower_and_place, program_folder, read_shapes
from compiler.drawing.host_moves import with_host_moves
from compiler.drawing.layout import GAP, Box, layered
from compiler.drawing.model import Drawing, drawing_of
from compiler.graph import renderer
from compiler.lower import lower
from compiler.placement import place
from compiler.proof.wellformed import all_steps
from rlhf_dsl.cli import main
from rlhf_dsl.frontend import load, loads
from tests.compiling import CLUSTER, PROGRAMS, checked_text, offloaded, shipped
from tests.test_offloading import LAGGING

GOLDEN = Path(__file__).parent / "golden"
FORMATS = ("tree", "dot", "mermaid", "svg", "html")
WANTED = [("ppo", "graph", format) for format in FORMATS] + [("grpo", "plan", "tree"), ("grpo", "plan", "svg")]
SVG = "{http://www.w3.org/2000/svg}"
ODD = '''
"""Names that other languages read as markup."""
dim b = 2
dim t <= 4
param p = 0.5
data x[b] = jsonl("<b>&\\"x\\".jsonl", "a")
model m = policy("builtin:tiny") trained by adamw(lr=1e-3)
state s = 1 then s * 2

rollout:
    y[b, t] = m.generate(x, stop=["</s>", "#"])
    keep if length[t](y) < 3 and length[t](y) > 1
    metric a = mean(m.logprobs(y, temperature=0.5)) * s

update(minibatches=2):
    train m to maximize mean(where(m.logprobs(y) < -1, m.logprobs(y), 0))
'''


def drawn(name: str, stage: str = "graph") -> Drawing:
    checked = load(GOLDEN / f"{name}.rlflow")
    if stage == "graph":
        return drawing_of(lower(checked), checked)
    shapes = read_shapes(checked, program_folder(checked.path))
    return drawing_of(lower_and_place(checked, place(checked, shapes, CLUSTER, 4)), checked)


def golden(name: str, stage: str, format: str) -> Path:
    return GOLDEN / "graph" / f"{name}.{stage}.{format}"


@pytest.mark.parametrize("name, stage, format", WANTED)
def test_it_looks_as_it_did(name, stage, format):
    assert renderer(format)(drawn(name, stage)) == golden(name, stage, format).read_text(encoding="utf-8")


# ---- what is shown

def test_the_tree_shows_every_operation_once():
    for drawing in (drawn("ppo"), drawn("grpo", "plan")):
        lines = renderer("tree")(drawing).splitlines()
        full = [line for line in lines if re.search(r"[├└]─ ", line) and not line.endswith(("↑", ")"))
                or re.search(r" = |: | to ", line)]
        assert len(full) == len(drawing.nodes)


@pytest.mark.parametrize("format", FORMATS)
def test_long_chains_are_drawn(format):
    lines = "".join(f"    x{i} = x{i - 1} + 1\n" for i in range(1, 1500))
    checked = loads(f"rollout:\n    x0 = 1\n{lines}    metric m = x1499\n")
    assert "x1499" in renderer(format)(drawing_of(lower(checked), checked))


def test_odd_names_stay_text():
    checked = loads(ODD)
    drawing = drawing_of(lower(checked), checked)
    picture = ElementTree.fromstring(renderer("svg")(drawing))
    titles = ["".join(node.itertext()) for node in picture.iter(f"{SVG}tspan")]
    assert "metric a" in titles and "keep 1" in titles
    labels = re.findall(r'\[label=("(?:[^"\\]|\\.)*")', renderer("dot")(drawing))
    assert len(labels) == len(drawing.nodes) + len(drawing.edges)
    for line in renderer("mermaid")(drawing).splitlines():
        assert line.count('"') in (0, 2) and "<s" not in line


def test_every_node_and_line_is_in_the_picture():
    drawing = drawn("grpo", "plan")
    picture = ElementTree.fromstring(renderer("svg")(drawing))
    nodes = [e.get("data-id") for e in picture.iter(f"{SVG}g")]
    lines = [(e.get("data-source"), e.get("data-target")) for e in picture.iter(f"{SVG}path") if e.get("data-source")]
    assert nodes == [str(node.id) for node in drawing.nodes]
    assert lines == [(str(edge.source), str(edge.target)) for edge in drawing.edges]


def test_pictures_are_light_and_dark():
    for format in ("svg", "html"):
        assert "@media (prefers-color-scheme: dark)" in renderer(format)(drawn("ppo"))


def test_a_page_needs_no_network():
    """Nothing is loaded: no address but the names of XML dialects, and nothing that could hold one."""
    class Page(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag not in ("link", "img", "iframe", "object", "embed", "base")
            assert not {"src", "href", "xlink:href"} & {name for name, _ in attrs}

    text = renderer("html")(drawn("ppo"))
    Page().feed(text)
    assert set(re.findall(r"\w+://[^\s\"'<)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_a_program_cannot_break_out_of_its_page():
    checked = loads('"""</script><script>alert(1)</script>"""\nrollout:\n    metric m = 1\n')
    text = renderer("html")(drawing_of(lower(checked), checked))
    assert text.count("<script") == 1 and text.count("</script") == 1


@pytest.mark.parametrize("program", ["ppo", "lagging"])
def test_what_leaves_for_the_host_is_drawn_where_the_plan_has_it(tmp_path, program):
    checked = shipped(tmp_path, "ppo") if program == "ppo" else checked_text(tmp_path, LAGGING)
    graphs = {}
    plan = offloaded(compile_program(checked, CLUSTER, 2, lambda name, graph, _: graphs.update(last=graph)))
    moves = [f"{s.op} {s.layout}" for _, s in all_steps(plan) if s.op in ("reload", "offload")]
    plain = drawing_of(graphs["last"], checked)
    drawing = with_host_moves(plain, graphs["last"], plan, checked)
    drawn = [node for node in drawing.nodes if node.kind in ("reload", "offload")]
    assert sorted(node.title for node in drawn) == sorted(moves) and moves
    assert [node.id for node in drawing.nodes] == list(range(len(plain.nodes) + len(moves)))
    assert {e.source for e in drawing.edges} | {e.target for e in drawing.edges} >= {node.id for node in drawn}
    assert all(edge.source < edge.target for edge in drawing.edges)
    shown = renderer("tree")(drawing)
    assert all(shown.count(f"{title}: ") == moves.count(title) for title in moves)
    ElementTree.fromstring(renderer("svg")(drawing))


def test_the_plan_that_offloads_nothing_is_the_graph(tmp_path):
    drawing = drawn("grpo", "plan")
    checked = load(GOLDEN / "grpo.rlflow")
    graphs = {}
    plan = compile_program(checked, CLUSTER, 4, lambda name, graph, _: graphs.update(last=graph))
    assert with_host_moves(drawing, graphs["last"], plan, checked) == drawing


# ---- where it stands

@st.composite
def graphs(draw):
    """Boxes of some phases, and edges from earlier to later ones."""
    count = draw(st.integers(1, 14))
    phases = sorted(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    sizes = st.floats(20, 300)
    boxes = [Box(i, phase, draw(sizes), draw(st.sampled_from([28.0, 44.0]))) for i, phase in enumerate(phases)]
    pairs = [(i, j) for j in range(count) for i in range(j)]
    return boxes, draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)) if pairs else []


@settings(max_examples=200, deadline=None)
@given(graphs())
def test_a_layout_is_readable(graph):
    boxes, edges = graph
    layout = layered(boxes, edges)
    corners = {b.id: (x - b.width / 2, y - b.height / 2, x + b.width / 2, y + b.height / 2)
               for b in boxes for x, y in [layout.places[b.id]]}
    for left, top, right, bottom in corners.values():
        assert left >= 0 and top >= 0 and right <= layout.width + 1e-6 and bottom <= layout.height + 1e-6
    for i, one in corners.items():
        for j, other in corners.items():
            beside = one[2] + GAP <= other[0] + 1e-6 or other[2] + GAP <= one[0] + 1e-6
            assert i == j or beside or one[3] < other[1] or other[3] < one[1]
    for source, target in edges:
        assert corners[source][3] < corners[target][1]  # a line goes down
        heights = [y for _, y in layout.lines[source, target]]
        assert heights == sorted(heights)
        assert (heights[0], heights[-1]) == pytest.approx((corners[source][3], corners[target][1]))
    for (_, bottom), (top, _) in zip(layout.phases, layout.phases[1:]):
        assert bottom < top
    assert layered(boxes, edges) == layout


def test_a_line_passes_no_box():
    boxes = [Box(i, 0, 100.0, 28.0) for i in range(5)]
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
    layout = layered(boxes, edges)
    for i in (1, 2, 3):
        x, y = layout.places[i]
        assert all(abs(px - x) > 50 for px, py in layout.lines[0, 4] if abs(py - y) <= 14)


def test_one_line_after_another_is_straight():
    layout = layered([Box(i, 0, 50.0 + i, 28.0) for i in range(4)], [(0, 1), (1, 2), (2, 3)])
    assert len({round(x, 6) for x, _ in layout.places.values()}) == 1


# ---- the command line

def test_stages_and_formats(capsys):
    program = str(GOLDEN / "grpo.rlflow")
    for stage in ("graph", "dce", "split_reductions", "place", "schedule", "plan"):
        assert main(["graph", program, "--stage", stage, "--ranks", "2"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("grpo\n") and ("to actor.generate" in out) == (stage in ("schedule", "plan"))
    shown = {}
    for stage in ("placed", "shard", "resharded", "reshard"):
        assert main(["graph", program, "--stage", stage, "--ranks", "2"]) == 0
        shown[stage] = capsys.readouterr().out
    assert shown["placed"] == shown["shard"] != shown["resharded"] == shown["reshard"]
    assert "@actor.train tp1 pp1 dp2" in shown["placed"] and "weights of actor" not in shown["placed"]
    assert "weights of actor" in shown["resharded"]
    assert main(["graph", program, "--stage", "schedul"]) == 2
    assert "did you mean `schedule`?" in capsys.readouterr().err


def test_what_the_program_says_needs_no_model(tmp_path, capsys):
    path = tmp_path / "p.rlflow"
    path.write_text(ODD.replace("builtin:tiny", "nowhere"))
    assert main(["graph", str(path)]) == 0
    assert "m.generate(x)" in capsys.readouterr().out
    assert main(["graph", str(path), "--stage", "plan"]) == 2
    assert "error[R0130]" in capsys.readouterr().err


def test_a_file_is_written_whole(tmp_path, capsys):
    path = tmp_path / "p.html"
    assert main(["graph", str(GOLDEN / "ppo.rlflow"), "--format", "html", "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"wrote {path}\n") and path.read_text().endswith("</html>\n")
    assert main(["graph", str(GOLDEN / "ppo.rlflow"), "-o", str(tmp_path / "none" / "x")]) == 2
    assert "error[P0110]" in capsys.readouterr().err


def test_a_tree_reads_no_templates():
    """Start-up of a terminal tree: pictures alone need jinja2."""
    code = "import sys; from rlhf_dsl.cli import main; main(['graph', sys.argv[1]]); print('jinja2' in sys.modules)"
    command = [sys.executable, "-c", code, str(GOLDEN / "ppo.rlflow")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.rlflow")), ids=lambda p: p.stem)
def test_every_program_is_drawn(path):
    checked = load(path)
    drawing = drawing_of(lower(checked), checked)
    ElementTree.fromstring(renderer("svg")(drawing))
    assert renderer("tree")(drawing).startswith(f"{path.stem}\n")


if __name__ == "__main__":
    for wanted in WANTED:
        golden(*wanted).parent.mkdir(exist_ok=True)
        golden(*wanted).write_text(renderer(wanted[2])(drawn(*wanted[:2])), encoding="utf-8")
