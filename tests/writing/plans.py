"""Random `plan:` sections that a number of ranks can have."""

from __future__ import annotations

import random
from typing import Iterator

from tests.writing.programs import Program

DEGREES = {1: ((1, 1, 1),), 2: ((2, 1, 1), (1, 2, 1), (1, 1, 2)), 3: ((1, 1, 3),),
           4: ((2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4), (4, 1, 1))}
WAYS = ("reshard(vanilla)", "reshard(all_gather)", "reshard(minimal)", "reshard(zero_redundancy)")


def plan(numbers: random.Random, program: Program, ranks: int) -> tuple[str, ...]:
    """Lines for `plan:`, perhaps none."""
    if numbers.random() < 0.25:
        return ()
    return tuple(_lines(numbers, program, ranks))


def _lines(numbers: random.Random, program: Program, ranks: int) -> Iterator[str]:
    models = list(program.roles)
    apart = _apart(numbers, models, ranks)
    rest = ranks - sum(devices for devices, _ in apart)
    for devices, members in [*apart, (rest, [m for m in models if not any(m in s for _, s in apart)])]:
        for model in members:
            place = [] if devices == rest and not any(members is s for _, s in apart) else \
                [f"devices({devices})"] if model == members[0] else [f"colocate({members[0]})"]
            items = [*place, *_items(numbers, program, model, devices)]
            if items:
                yield f"{model}: {', '.join(items)}"
            if model in program.sampling and numbers.random() < 0.5:
                yield f"{model}.generate: {_sampling(numbers, devices)}"
    if numbers.random() < 0.2:
        yield "assume: prompt=10, response=4"


def _apart(numbers: random.Random, models: list[str], ranks: int) -> list[tuple[int, list[str]]]:
    """Perhaps a set of models with ranks of its own; others share what is left."""
    if ranks == 1 or len(models) == 1 or numbers.random() < 0.5:
        return []
    members = numbers.sample(models, numbers.randint(1, len(models) - 1))
    return [(numbers.randint(1, ranks - 1), sorted(members, key=models.index))]


def _items(numbers: random.Random, program: Program, model: str, devices: int) -> Iterator[str]:
    tp, pp, dp = numbers.choice(DEGREES[devices])
    if numbers.random() < 0.8:
        yield f"parallel(tp={tp}, pp={pp}, dp={dp})"
    if numbers.random() < 0.6:
        yield numbers.choice(("micro_batch(1)", "micro_batch(2)", "micro_batch(3)", "tokens(64)", "tokens(200)"))
    trains = model in program.trained
    if numbers.random() < 0.2:
        yield "sequence_parallel(true)"
    if trains and numbers.random() < 0.2:
        yield "recompute(full)"
    if trains and numbers.random() < 0.2:
        yield "optimizer(sharded)"


def _sampling(numbers: random.Random, devices: int) -> str:
    items = [f"parallel(tp={2 if devices % 2 == 0 and numbers.random() < 0.5 else 1})"]
    return ", ".join(items + ([numbers.choice(WAYS)] if numbers.random() < 0.4 else []))
