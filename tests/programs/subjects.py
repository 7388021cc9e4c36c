"""The shipped programs, and random numbers in place of what their models and Python ops give."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import torch

from rlhf_dsl.frontend import load
from tests.programs import formulas, group_formulas
from tests.programs.formulas import Formula, Iteration

PROGRAMS = Path(__file__).resolve().parents[2] / "programs"


@dataclass(frozen=True)
class Subject:
    """A program and what it is fed.

    dims: sizes; old, new: calls of rollout and update, as printed; minibatches, epochs: the program's own
    state, data: names of states and of columns that are not text
    """

    formula: Callable[[Iteration], Formula]
    dims: Mapping[str, int]
    old: tuple[str, ...]
    new: tuple[str, ...]
    minibatches: int = 1
    epochs: int = 1
    state: tuple[str, ...] = ()
    data: tuple[str, ...] = ()

    @property
    def responses(self) -> dict[str, tuple[str, ...]]:
        """Response → the dims it is sampled over."""
        named = dict.fromkeys(response_of(call) for call in (*self.old, *self.new))
        groups = ("g",) if "g" in self.dims else ()
        return {name: ("c",) if name == "text" else ("b", *groups) for name in named}


CRITIC = ("actor.logprobs(y)", "ref.logprobs(y)", "reward.score(y)", "critic.values(y)")
GROUP, CHECKED = {"b": 4, "g": 3}, ("actor.logprobs(y)", "exact_match(y.text, answer)")
PAIRS = ("actor.logprobs(good)", "ref.logprobs(good)", "actor.logprobs(bad)", "ref.logprobs(bad)")
POLICY = ("actor.logprobs(y)",)
SUBJECTS = {
    "ppo": Subject(formulas.ppo, {"b": 8}, CRITIC, (*POLICY, "critic.values(y)"), 4, 2),
    "ppo_ptx": Subject(formulas.ppo_ptx, {"b": 8, "c": 4}, CRITIC,
                       (*POLICY, "critic.values(y)", "actor.logprobs(text)"), 4, 2),
    "safe_rlhf": Subject(formulas.safe_rlhf, {"b": 8}, (*CRITIC, "cost.score(y)", "cost_critic.values(y)"),
                         (*POLICY, "critic.values(y)", "cost_critic.values(y)"), 4, 2, state=("log_lam",)),
    "vapo": Subject(group_formulas.vapo, GROUP, (*CHECKED, "critic.values(y)"), (*POLICY, "critic.values(y)"), 2),
    "remax": Subject(formulas.remax, {"b": 5}, (*CRITIC[:3], "reward.score(greedy)"), POLICY),
    "reinforce_pp": Subject(formulas.reinforce_pp, {"b": 8}, CRITIC[:3], POLICY, 4),
    "distill": Subject(formulas.distill, {"b": 6}, ("student.logprobs(y)", "teacher.logprobs(y, temperature=0.5)"),
                       ("student.logprobs(y)",), 2),
    "grpo": Subject(group_formulas.grpo, GROUP, (*CHECKED, "ref.logprobs(y)"), POLICY, 2),
    "dr_grpo": Subject(group_formulas.dr_grpo, GROUP, CHECKED, POLICY, 2),
    "dapo": Subject(group_formulas.dapo, GROUP, CHECKED, POLICY, 2),
    "gspo": Subject(group_formulas.gspo, GROUP, CHECKED, POLICY, 4),
    "cispo": Subject(group_formulas.cispo, GROUP, CHECKED, POLICY, 4),
    "rloo": Subject(group_formulas.rloo, GROUP, CRITIC[:3], POLICY),
    "opo": Subject(group_formulas.opo, GROUP, CHECKED, POLICY),
    "online_dpo": Subject(group_formulas.online_dpo, GROUP, ("ref.logprobs(y)", "reward.score(y)"), POLICY),
    "dpo": Subject(formulas.dpo, {"b": 5}, (), PAIRS),
    "ipo": Subject(formulas.ipo, {"b": 5}, (), PAIRS),
    "kto": Subject(formulas.kto, {"b": 6}, (), (*POLICY, "ref.logprobs(y)", "actor.logprobs(mismatched)",
                                              "ref.logprobs(mismatched)"), data=("desirable",)),
    "sft": Subject(formulas.sft, {"b": 5}, (), ("actor.logprobs(answer)",)),
    "reward_model": Subject(formulas.reward_model, {"b": 5}, (), ("reward.score(good)", "reward.score(bad)")),
}


def response_of(call: str) -> str:
    """`y` of `actor.logprobs(y, temperature=0.5)` and of `exact_match(y.text, answer)`."""
    return call.partition("(")[2].split(",")[0].strip(")").removesuffix(".text")


class Numbers:
    """Random results for every call of a subject."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.subject, self.random = name, SUBJECTS[name], random.Random(f"{name} {seed}")
        self.lengths = {response: self.nested(over, lambda: self.random.choice((1, 1, 2, 3, 5, 8)))
                        for response, over in self.subject.responses.items()}
        self.old = {call: self.call(call) for call in self.subject.old}
        self.new = {call: self.near(self.old[call]) if call in self.old else self.call(call)
                    for call in self.subject.new}
        self.data = {column: self.nested(("b",), lambda: self.random.random() < 0.5) for column in self.subject.data}
        self.state = {name: self.random.uniform(-1, 1) for name in self.subject.state}

    def nested(self, over: tuple[str, ...], make: Callable[[], Any]) -> Any:
        return [self.nested(over[1:], make) for _ in range(self.subject.dims[over[0]])] if over else make()

    def call(self, call: str) -> Any:
        response = response_of(call)
        over = self.subject.responses[response]
        if call.startswith("exact_match"):
            return self.rewards(over, (0.0, 1.0))
        if ".score(" in call:
            return self.rewards(over, (-0.7, 0.4, 1.3, 2.2))
        low, high = (-2.5, -0.05) if ".logprobs(" in call else (-1.0, 1.5)
        return deep(lambda n: [self.random.uniform(low, high) for _ in range(n)], self.lengths[response])

    def rewards(self, over: tuple[str, ...], among: tuple[float, ...]) -> Any:
        """Every third group has equal rewards; others differ, mostly."""
        if len(over) == 1:
            return self.nested(over, lambda: self.random.choice(among))
        size = self.subject.dims[over[1]]
        groups = [[self.random.choice(among) for _ in range(size)] for _ in range(self.subject.dims[over[0]])]
        return [group[:1] * size if self.random.random() < 0.3 else group for group in groups]

    def near(self, values: Any) -> Any:
        """Some numbers unchanged, so that the ratio is 1; some within the clip range; some outside it."""
        return deep(lambda v: v + self.random.choice((0.0, 1e-4, 0.1, 0.6)) * self.random.uniform(-1, 1), values)

    def iteration(self) -> Iteration:
        """Anew each time, so that gradients of one do not meet those of another."""
        program, new = checked(self.name), {}
        for call, values in self.new.items():
            new[call] = deep(lambda v: torch.tensor(v, dtype=torch.float64, requires_grad=True), values)
        params = {p.name: p.value for p in program.params.values()} | {d.name: d.size for d in program.dims.values()}
        return Iteration(params | dict(self.subject.dims), self.old, new, self.data, self.state)

    def feed(self) -> dict[str, Any]:
        return {
            "format": "rlflow.feed/1", "dims": dict(self.subject.dims), "data": self.data, "state": self.state,
            "responses": {name: {"lengths": lengths} for name, lengths in self.lengths.items()},
            "calls": {"rollout": self.old, "update": self.new}}


def deep(change: Callable[[Any], Any], values: Any) -> Any:
    """`change` of every number in nested lists."""
    return [deep(change, v) for v in values] if isinstance(values, list) else change(values)


def flat(values: Any) -> Iterator[Any]:
    if isinstance(values, list):
        for value in values:
            yield from flat(value)
    else:
        yield values


@cache
def checked(name: str):
    return load(str(PROGRAMS / f"{name}.rlflow"), {})
