"""The plan never changes the result, wherever models lie: models on ranks of their own equal the one-rank run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Iterator

import pytest
import torch

from compiler.compile import compile_program
from tests.distributed.judging import MADE, Run, Subject, Verdict, check_few_part, judge, run_plans, table
from tests.distributed.planted import PLANTED
from tests.oracle import Oracle

SMALL = {"e": "3", "run.steps": "2"}
ONE_STEP = ("epochs=2, minibatches=4", "epochs=2, minibatches=1")
# The reference follows the actor across ranks; the second iteration's penalty shows it.
FOLLOWS = ("every 40: save(actor)", "every 1: ema(actor, ref, 0.9)\n    every 40: save(actor)")
COPIES = ("every 100: save(actor)", "every 1: copy(actor, ref)\n    every 100: save(actor)")
# Seven rows on three ranks, say; `tiny` has four layers and two KV heads, `odd` three, one, and tied embeddings.
SUBJECTS = {
    "ppo": Subject("ppo", "odd", SMALL | {"b": "7", "lr": "1e-3"}, (ONE_STEP, FOLLOWS)),
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
ON_EIGHT = {"together": ((REST, 8),), "pairs": ((("actor", "ref"), 4), (REST, 4)),
            "actor alone": ((("actor",), 4), (REST, 4))}
EACH_ALONE = {
    "ppo": ((1, 1, 1, 1), (2, 1, 2, 3)), "grpo": ((2, 2), (3, 1), (1, 2), (4, 4), (1, 3), (2, 1)),
    "remax": ((2, 1, 1), (1, 1, 1), (3, 3, 2)), "safe_rlhf": ((1, 1, 1, 1, 1, 1), (3, 1, 1, 1, 1, 1)),
}
MODELS = {
    "ppo": ("actor", "ref", "critic", "reward"), "grpo": ("actor", "ref"), "remax": ("actor", "ref", "reward"),
    "safe_rlhf": ("actor", "ref", "critic", "cost_critic", "reward", "cost"),
}
DEGREES = {  # (tp, pp, dp) by the number of ranks
    1: ((1, 1, 1),), 2: ((2, 1, 1), (1, 2, 1), (1, 1, 2)), 3: ((1, 3, 1), (1, 1, 3)),
    4: ((4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1), (1, 1, 4)), 8: ((2, 2, 2), (4, 2, 1), (4, 1, 2)),
}
SAMPLER_TP = (1, 2, 1, 4)  # by turn, where it divides the ranks
LAYERS = {"tiny": 4, "odd": MADE["odd"]["num_hidden_layers"]}
KV_HEADS = {"tiny": 2, "odd": MADE["odd"]["num_key_value_heads"]}


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

    @property
    def shares_ranks(self) -> bool:
        """All models, with each other."""
        return len(self.sets) == 1

    def degrees(self) -> dict[str, tuple[int, tuple[int, int, int]]]:
        """Of each model: how many ranks its set has, and (tp, pp, dp)."""
        named = {model for models, _ in self.sets for model in models}
        rest = [model for model in MODELS[self.subject] if model not in named]
        turns, layers, found = itertools.count(self.turn), LAYERS[SUBJECTS[self.subject].base], {}
        for models, ranks in self.sets:
            possible = [d for d in DEGREES[ranks] if d[1] <= layers]
            found |= {m: (ranks, possible[next(turns) % len(possible)]) for m in (rest if models == REST else models)}
        return found

    def plan(self) -> str:
        """The `plan:` section."""
        first_of = {model: models[0] for models, _ in self.sets for model in models}
        lines = []
        for model, (ranks, (tp, pp, dp)) in self.degrees().items():
            place = f"devices({ranks}), " if first_of.get(model) == model else f"colocate({first_of.get(model)}), "
            place = place if model in first_of else ""
            lines.append(f"{model}: {place}parallel(tp={tp}, pp={pp}, dp={dp}), micro_batch({2 + self.turn})")
        ranks, tp = self.degrees()["actor"][0], SAMPLER_TP[self.turn % len(SAMPLER_TP)]
        lines.append(f"actor.generate: parallel(tp={1 if ranks % tp else tp})")
        return "\nplan:\n" + "".join(f"    {line}\n" for line in lines)


def cases() -> Iterator[Case]:
    for number, subject in enumerate(SUBJECTS):
        for placement, choices in PLACEMENTS.items():
            if subject == "grpo" and placement != "together":
                continue  # its models are actor and ref: each is alone
            first = int(placement == "actor alone")  # else its actors would be those of the pairs
            for turn, sets in enumerate(choices, first):
                yield Case(subject, placement, sets, turn)
            yield Case(subject, placement, ON_EIGHT[placement], first + number)
        for turn, sizes in enumerate(EACH_ALONE[subject]):
            yield Case(subject, "each alone", tuple(((m,), n) for m, n in zip(MODELS[subject], sizes)), turn)


CASES = list(cases())
FAULTY = next(case for case in CASES if case.name == "ppo pairs 2+2 turn0")  # the critic has two data shards
REFERENCES = {name: Case(name, "one rank", ((REST, 1),), 0) for name in SUBJECTS}


@pytest.fixture(scope="module")
def results(programs, tmp_path_factory) -> dict[str, dict]:
    """What each case gave, all cases of a number of ranks in one launch."""
    plans = {}
    for case in [*REFERENCES.values(), *CASES]:
        plans[case.name] = compile_program(SUBJECTS[case.subject].checked(case.plan(), programs), ranks=case.ranks)
    plans |= {f"{FAULTY.name} planted {fault}": plans[FAULTY.name] for fault in PLANTED}
    return run_plans(plans, tmp_path_factory.mktemp("placements"))


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
    check_few_part(verdicts)


def test_every_program_runs_in_every_placement_on_four_and_on_eight_ranks():
    found = {(case.subject, case.placement, case.ranks) for case in CASES}
    placements, sizes = (*PLACEMENTS, "each alone"), (4, 8)
    impossible = {("grpo", "pairs"), ("grpo", "actor alone")}  # it has two models, so these are two others
    wanted = {(s, p, n) for s, p, n in itertools.product(SUBJECTS, placements, sizes) if (s, p) not in impossible}
    assert wanted - found == {("safe_rlhf", "each alone", 4)}  # it has six models
    assert ("safe_rlhf", "each alone", 6) in found


def test_nothing_divides_evenly_on_ranks_of_their_own():
    """Of trained actors that share no rank with some other model."""
    found = set()
    for case in (case for case in CASES if not case.shares_ranks):
        subject, (_, (tp, pp, dp)) = SUBJECTS[case.subject], case.degrees()["actor"]
        facts = {"kv heads < tp": KV_HEADS[subject.base] < tp, "layers": LAYERS[subject.base] % pp,
                 "rows": int(subject.overrides["b"]) % dp, "tied and cut": subject.base in MADE and tp * pp > 1}
        found |= {(fact, case.ranks) for fact, holds in facts.items() if holds}
    assert found >= set(itertools.product(("kv heads < tp", "layers", "rows", "tied and cut"), (4, 8)))


def test_table(verdicts, results, capsys):
    """Prints the largest deviations."""
    with capsys.disabled():
        print(table(verdicts, results))
    assert len(verdicts) == len(SUBJECTS) + len(CASES)
