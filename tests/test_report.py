"""`rlflowc explain --format html`: one file that needs nothing else, and says what the plan says."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from compiler.cluster_file import read_cluster
from compiler.compile import compile_program
from compiler.cost import CostModel, iteration_seconds
from compiler.groups import groups_of
from compiler.plan import Plan, UpdateLoop
from compiler.proof.verify import walk
from compiler.reading.report.dataflow import LEFT_OUT, dataflow_of
from compiler.reading.report.devices import MOST_CELLS, cells_of, cut_of
from compiler.reading.report.lanes import lanes_of
from compiler.reading.report.page import report
from compiler.reading.searched import groups_text
from compiler.reading.tables import rows_of, title_of
from compiler.reading.units import bytes_text, seconds_text
from compiler.reading.why import why, why_text
from compiler.search.program import Searched
from rlhf_dsl.cli import main
from rlhf_dsl.frontend import loads
from tests.compiling import CLUSTER, PROGRAMS, compiled, model_folder, shipped
from tests.test_explain import PPO

CATALOG = PPO.replace('param base = "MODEL"', 'param base = "catalog:llama-2-7b"').replace("dim b = 8", "dim b = 1024")
SECTIONS = ["timeline", "devices", "memory", "transfers", "runners-up", "dataflow", "steps", "program"]
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Tags that are opened and closed in order, attributes, texts by section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, list[str]] = {}
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.section = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "section":
            self.section = dict(attrs)["id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.sections.setdefault(self.section, []).append(data.strip())


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    return compiled(tmp_path_factory.mktemp("report"), PPO, 4)


@pytest.fixture(scope="module")
def large() -> tuple:
    """PPO of four 7B models where the search puts them on 1,024 devices: (plan, cluster)."""
    cluster = read_cluster(PROGRAMS / "clusters" / "h100-128x8.toml")
    checked = loads(CATALOG.split("plan:")[0], {}, str(PROGRAMS / "large.rlflow"))
    return compile_program(checked, cluster, placer=Searched()), cluster


def test_a_page_needs_no_network_and_runs_nothing(plan):
    text = report(plan, CLUSTER, PPO.splitlines())
    found = Page(text)
    assert not any(name in ("src", "srcset", "action") or name.startswith("on") for _, name, _ in found.attributes)
    assert all(value.startswith("#") for _, name, value in found.attributes if name in ("href", "xlink:href"))
    assert not re.search(r"<(script|link|img|iframe|object|embed|base)\b", text)
    assert set(re.findall(r"\w+://[^\s\"'<)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_a_page_is_light_dark_and_for_paper(plan):
    text = report(plan, CLUSTER, [])
    assert "@media (prefers-color-scheme: dark)" in text and "@media print" in text
    light, dark = (set(re.findall(r"--(\w+):", part)) for part in re.search(
        r":root \{(.*?)\}.*?dark\) \{\s*:root \{(.*?)\}", text, re.S).groups())
    assert light - dark == {"bar", "heat", "home"} - dark and {"ground", "text", "m0", "p0"} <= dark


def test_every_section_is_there_and_has_its_heading(plan):
    found = Page(report(plan, CLUSTER, PPO.splitlines()))
    assert [s for s in found.sections if s] == SECTIONS
    assert len(found.ids) == len(set(found.ids))


def test_every_picture_has_a_text(plan):
    pictures = re.findall(r"<svg\b[^>]*>", report(plan, CLUSTER, []))
    assert len(pictures) > 10
    assert all('role="img"' in tag and "aria-label" in tag or 'aria-hidden="true"' in tag for tag in pictures)


def test_it_says_what_the_plan_and_the_cost_model_say(plan):
    found, costs = Page(report(plan, CLUSTER, PPO.splitlines())), CostModel(plan, CLUSTER)
    assert seconds_text(iteration_seconds(costs)) in found.sections[""]
    texts = {name: " | ".join(parts) for name, parts in found.sections.items()}
    for row in rows_of(plan):
        if not isinstance(row.step, UpdateLoop):
            assert row.title in found.sections["steps"], row.title
    for model in plan.models:
        assert bytes_text(costs.memory(model).total) in texts["memory"]
    moved = next(r for r in rows_of(plan) if r.step.op == "reshard")
    assert bytes_text(costs.moved(moved.step).total) in found.sections["transfers"]
    for layout, spec in plan.layouts.items():
        assert f"tp{spec.tp} pp{spec.pp} dp{spec.dp}" in texts["devices"], layout
    assert all(line.strip() in texts["program"] for line in PPO.splitlines() if line.strip())


def test_a_program_cannot_break_out_of_its_page(plan):
    text = report(plan, CLUSTER, ["</code></table><script>alert(1)</script>", '"><img src=x onerror=alert(1)>'])
    found = Page(text)
    assert not re.search(r"<(script|img)\b", text) and "alert(1)" in " ".join(found.sections["program"])


def test_the_timeline_is_that_of_the_cost_model(large):
    plan, cluster = large
    costs = CostModel(plan, cluster)
    lanes = lanes_of(plan, costs)
    assert lanes.seconds == iteration_seconds(costs) and len(lanes.groups) == len(groups_of(plan))
    for blocks in lanes.groups:
        ordered = sorted(blocks, key=lambda b: (b.start, b.end))
        for one, other in zip(ordered, ordered[1:]):
            assert one.end <= other.start + 1e-9, (one, other)
        assert all(0 <= b.start <= b.end <= lanes.seconds * (1 + 1e-9) for b in blocks)
    work = {(b.title, b.model): b.end - b.start for blocks in lanes.groups for b in blocks if b.model}
    for row in rows_of(plan):
        if row.section == "an iteration" and row.step.op in ("generate", "forward", "train", "optimizer"):
            each = costs.seconds(row.step, row.part)
            assert work[row.title, row.step.model] == pytest.approx(row.times * each), row.title
    assert 3 <= len(lanes.ticks) <= 10 and lanes.ticks[-1] <= lanes.seconds


def test_a_thousand_devices_stay_readable(large):
    plan, cluster = large
    assert plan.world == 1024
    cells = cells_of(plan, cluster)
    assert len(cells) <= MOST_CELLS and [c.first for c in cells[1:]] == [c.last + 1 for c in cells[:-1]]
    assert (cells[0].first, cells[-1].last) == (0, 1023)
    text = report(plan, cluster, [])
    Page(text)
    assert len(text) < 300_000 and "this plan" in text


def test_cells_are_of_one_group_each(tmp_path):
    text = PPO.replace("    actor.train: parallel(tp=2, pp=2)\n", "").replace("critic: parallel(pp=2)", "critic: devices(3)")
    plan = compiled(tmp_path, text, 8)
    cells = cells_of(plan, CLUSTER)
    of = {rank: i for i, g in enumerate(groups_of(plan)) for rank in range(g.first, g.first + g.ranks)}
    assert [c.group for c in cells] == [of.get(rank, -1) for rank in range(8)]


def test_a_cut_shows_its_degrees_or_the_first_of_them(plan):
    cut = cut_of(plan.layouts["actor.train"])
    assert (cut.columns, cut.rows, cut.stripes) == ((1, 1), (2, 2), (2, 2))
    assert cut.told == "1 data shard of 2 stages of 2 tensor shards"


@pytest.mark.parametrize("name", ["ppo", "grpo", "dpo", "vapo", "distill", "safe_rlhf"])
def test_the_data_flow_has_every_step_once(tmp_path, name):
    plan = compile_program(shipped(tmp_path, name), CLUSTER, 2)
    drawing = dataflow_of(plan)
    steps = [step for step in walk(plan) if step.op not in LEFT_OUT]
    assert len(drawing.nodes) == len(steps) and [n.id for n in drawing.nodes] == list(range(len(steps)))
    assert all(edge.source < edge.target for edge in drawing.edges)
    made = {name for node in drawing.nodes for name, _ in node.values}
    assert all(set(edge.names) <= made | {"gradient"} for edge in drawing.edges)
    Page(report(plan, CLUSTER, []))


def test_the_command_line(tmp_path, monkeypatch, capsys):
    model_folder(tmp_path / "model")
    program = tmp_path / "p.rlflow"
    program.write_text(PPO.replace("MODEL", "model"))
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "p.rlflow", "--ranks", "4", "--format", "html", "-o", "p.html"]) == 0
    assert capsys.readouterr().err == "wrote p.html\n"
    whole = (tmp_path / "p.html").read_text()
    assert main(["compile", "p.rlflow", "--ranks", "4", "-o", "p.plan.json"]) == 0
    assert main(["explain", "p.plan.json", "--format", "html", "-o", "q.html"]) == 0
    assert (tmp_path / "q.html").read_text() == whole
    program.write_text("# another\n" + program.read_text())
    assert main(["explain", "p.plan.json", "--format", "html", "-o", "q.html"]) == 0
    assert "these are the lines that the plan refers to" in (tmp_path / "q.html").read_text()
    assert main(["explain", "p.plan.json", "--format", "html", "--json"]) == 2
    assert "E0005" in capsys.readouterr().err


OFFLOADED = """dim b = 64
dim t <= 512
data x[b] = jsonl("d.jsonl", "x")
model actor = policy("catalog:llama-2-7b") trained by adamw(lr=1e-5)
model ref   = policy("catalog:llama-2-7b")
model critic = value("catalog:llama-2-7b") trained by adamw(lr=1e-5)
rollout:
    y[b, t] = actor.generate(x)
    old = actor.logprobs(y)
    adv = old - ref.logprobs(y) - critic.values(y)
update(minibatches=2):
    train actor to maximize mean(exp(actor.logprobs(y) - old) * adv)
    train critic to minimize mean(critic.values(y) ** 2)
"""


def test_a_plan_that_offloads_has_a_page(tmp_path):
    cluster = read_cluster(PROGRAMS / "clusters" / "a100-1x8.toml")
    plan = compile_program(loads(OFFLOADED, {}), cluster, 2, placer=Searched())
    moved = [step for step in walk(plan) if step.op in ("reload", "offload")]
    assert moved and any(spec.offload for spec in plan.models.values())
    found = Page(report(plan, cluster, []))
    assert all(title_of(step) in found.sections["steps"] for step in moved)
    assert "idle in host memory" in found.sections["devices"]
    for step in moved:
        assert "lies in the host's memory" in why_text(why(plan, cluster, title_of(step)))


def test_a_sampler_has_a_lane_and_a_card_of_its_own(tmp_path):
    text = PPO.split("plan:")[0] + "plan:\n    actor.generate: devices(2)\nrun:\n    steps = 2\n    lag = 1\n"
    plan = compiled(tmp_path, text, 4)
    costs, found = CostModel(plan, CLUSTER), Page(report(plan, CLUSTER, []))
    lanes = lanes_of(plan, costs)
    number = next(i for i, group in enumerate(groups_of(plan)) if group.samplers)
    assert [block.title for block in lanes.groups[number] if block.model] == ["weights of actor", "generate y"]
    assert "actor.generate" in " ".join(found.sections["timeline"]) and "actor.generate" in " ".join(found.sections["devices"])
    assert bytes_text(costs.memory("actor.generate").total) in found.sections["memory"]
    assert "actor.generate: 2 ranks" in groups_text(groups_of(plan))
    drawing = dataflow_of(plan)
    ahead = next(phase for phase in drawing.phases if phase.title == "for the next iteration")
    assert [node.title for node in ahead.nodes] == ["prompts", "y"]


def test_a_plan_without_models_has_a_page(tmp_path):
    text = 'dim b = 4\ndata x[b] = jsonl("d.jsonl", "x")\nstate n = 0.0 then n + 1\nrollout:\n    metric m = n\n'
    plan = compiled(tmp_path, text, 2)
    assert plan.models == {} and [s for s in Page(report(plan, CLUSTER, [])).sections if s]
