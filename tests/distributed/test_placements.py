"""The plan never changes the result, wherever models lie: models on ranks of their own equal the one-rank run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import pytest
import torch

from compiler.compile import compile_program
from rlhf_dsl.typed import Checked
from tests.distributed.judging import HEADER, Run, Subject, Verdict, judge, launch, result, shipped_programs
from tests.distributed.planted import PLANTED
from tests.oracle import Oracle

SMALL = {"e": "3", "run.steps": "2"}
ONE_STEP = ("epochs=2, minibatches=4", "epochs=2, minibatches=1")
# The reference follows the actor across ranks; the second iteration's penalty shows it.
FOLLOWS = ("every 40: save(actor)", "every 1: ema(actor, ref, 0.9)\n    every 40: save(actor)")
COPIES = ("every 100: save(actor)", "every 1: copy(actor, ref)\n    every 100: save(actor)")
# Seven rows on three ranks, say; `qwen2` has tied embeddings and two layers, `tiny` four layers and two KV heads.
SUBJECTS = {
    "ppo": Subject("ppo", "qwen2", SMALL | {"b": "7", "lr": "1e-3"}, (ONE_STEP, FOLLOWS)),
    "grpo": Subject("grpo", "tiny", SMALL | {"b": "6", "g": "2"}, (("temperature=1.0", "temperature=1.3"),)),
    "remax": Subject("remax", "tiny", SMALL | {"b": "7"}, (COPIES,)),
    "safe_rlhf": Subject("safe_rlhf", "tiny", SMALL | {"b": "4"},
                         (("epochs=2, minibatches=4", "epochs=1, minibatches=2"),)),
}
# Sets of models, each with its number of ranks; the models of "rest" are all that no other set names.
REST = ("rest",)
PLACEMENTS = {
    "together": (((REST, 4),), ((REST, 3),)),
    "pairs": (((("actor", "ref"), 2), (REST, 2)), ((("actor", "ref"), 3), (REST, 1)),
              ((("actor", "ref"), 1), (REST, 2))),
    "actor alone": (((("actor",), 2), (REST, 2)), ((("actor",), 3), (REST, 1)), ((("actor",), 1), (REST, 3))),
}
EACH_ALONE = {
    "ppo": ((1, 1, 1, 1), (2, 1, 2, 3)), "grpo": ((2, 2), (3, 1), (1, 2), (4, 4), (1, 3), (2, 1)),
    "remax": ((2, 1, 1), (1, 1, 1)), "safe_rlhf": ((1, 1, 1, 1, 1, 1), (3, 1, 1, 1, 1, 1)),
}
MODELS = {
    "ppo": ("actor", "ref", "critic", "reward"), "grpo": ("actor", "ref"), "remax": ("actor", "ref", "reward"),
    "safe_rlhf": ("actor", "ref", "critic", "cost_critic", "reward", "cost"),
}
LARGE = ((REST, 8),), ((("actor", "ref"), 4), (REST, 4))
DEGREES = {  # (tp, pp, dp) by the number of ranks
    1: ((1, 1, 1),), 2: ((2, 1, 1), (1, 2, 1), (1, 1, 2)), 3: ((1, 3, 1), (1, 1, 3)),
    4: ((4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1), (1, 1, 4)), 8: ((2, 2, 2), (4, 2, 1), (4, 1, 2)),
}
MAY_PART = 1e-3  # of all rows


@dataclass(frozen=True)
class Case:
    """sets: models that share ranks, and how many; turn: which of the possible degrees each model gets."""

    subject: str
    placement: str
    sets: tuple[tuple[tuple[str, ...], int], ...]
    turn: int

    @property
    def name(self) -> str:
        sizes = "+".join(str(ranks) for _, ranks in self.sets)
        return f"{self.subject} {self.placement} {sizes} turn{self.turn}"

    @property
    def ranks(self) -> int:
        return sum(ranks for _, ranks in self.sets)

    def plan(self, checked: Checked) -> str:
        """The `plan:` section."""
        return "\nplan:\n" + "\n".join(f"    {line}" for line in self._lines(checked)) + "\n"

    def _lines(self, checked: Checked) -> Iterator[str]:
        named = {model for models, _ in self.sets for model in models}
        turns = itertools.count(self.turn)
        for models, ranks in self.sets:
            members = models if models != REST else tuple(m for m in checked.models if m not in named)
            for model in members:
                degrees = [d for d in DEGREES[ranks] if d[1] <= 2 or SUBJECTS[self.subject].base != "qwen2"]
                tp, pp, dp = degrees[next(turns) % len(degrees)]
                place = f"devices({ranks}), " if model == models[0] else f"colocate({models[0]}), "
                place = "" if models == REST else place
                yield f"{model}: {place}parallel(tp={tp}, pp={pp}, dp={dp}), micro_batch({2 + self.turn})"
                if model == "actor":
                    yield f"actor.generate: parallel(tp={2 if ranks % 2 == 0 and self.turn % 2 else 1})"


def cases() -> Iterator[Case]:
    for subject in SUBJECTS:
        for placement, choices in PLACEMENTS.items():
            if subject == "grpo" and placement != "together":
                continue  # its models are actor and ref: each is alone
            for turn, sets in enumerate(choices):
                yield Case(subject, placement, sets, turn)
        for turn, sizes in enumerate(EACH_ALONE[subject]):
            yield Case(subject, "each alone", tuple(((m,), n) for m, n in zip(MODELS[subject], sizes)), turn)
    yield Case("ppo", "together", LARGE[0], 0)
    yield Case("ppo", "pairs", LARGE[1], 1)
    yield Case("safe_rlhf", "pairs", LARGE[1], 0)


CASES = list(cases())
FAULTY = next(case for case in CASES if case.name == "ppo pairs 2+2 turn0")  # the critic has two data shards
REFERENCES = {name: Case(name, "one rank", ((REST, 1),), 0) for name in SUBJECTS}


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    return shipped_programs(tmp_path_factory.mktemp("shipped") / "programs")


@pytest.fixture(scope="module")
def results(programs, tmp_path_factory) -> dict[str, dict]:
    """What each case gave, all cases of a number of ranks in one launch."""
    folder, everything = tmp_path_factory.mktemp("placements"), [*REFERENCES.values(), *CASES]
    for case in everything:
        subject = SUBJECTS[case.subject]
        plan = compile_program(subject.checked(case.plan(subject.checked("", programs)), programs), ranks=case.ranks)
        (folder / f"{case.name}.plan.json").write_text(plan.to_json())
        for fault in PLANTED if case is FAULTY else ():
            (folder / f"{case.name} planted {fault}.plan.json").write_text(plan.to_json())
    for ranks in sorted({case.ranks for case in everything}):
        launch(ranks, folder)
    names = [*(case.name for case in everything), *(f"{FAULTY.name} planted {fault}" for fault in PLANTED)]
    return {name: result(folder, name) for name in names}


@pytest.fixture(scope="module")
def verdicts(results, programs) -> dict[str, Verdict]:
    """Of each case against the one-rank run of its subject; of that, under the subject's name, against the oracle."""
    torch.set_num_threads(1)
    found = {}
    for name, subject in SUBJECTS.items():
        reference, checked = Run.of_result(results[REFERENCES[name].name]), subject.checked("", programs)
        found[name] = judge(reference, Run.of_oracle(Oracle(checked)), checked)
        found |= {case.name: judge(Run.of_result(results[case.name]), reference, checked)
                  for case in CASES if case.subject == name}
    return found


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(results, programs, fault):
    reference, checked = Run.of_result(results[REFERENCES["ppo"].name]), SUBJECTS["ppo"].checked("", programs)
    with pytest.raises(AssertionError):
        judge(Run.of_result(results[f"{FAULTY.name} planted {fault}"]), reference, checked).check()


@pytest.mark.parametrize("name", [*SUBJECTS, *(case.name for case in CASES)])
def test_equals_one_rank(verdicts, name):
    verdicts[name].check()


def test_few_rows_part(verdicts):
    assert sum(v.parted for v in verdicts.values()) <= MAY_PART * sum(v.rows for v in verdicts.values())


def test_table(verdicts, results, capsys):
    """Prints the largest deviations."""
    seconds = {name: f"{found['seconds']:6.1f} s" for name, found in results.items() if "planted" not in name}
    with capsys.disabled():
        print("", HEADER, *(f"{n:<52} {v} {seconds.get(n, '  oracle')}" for n, v in verdicts.items()), sep="\n")
    assert len(verdicts) == len(SUBJECTS) + len(CASES)
