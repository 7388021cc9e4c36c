"""Random programs that are right: what `check` takes compiles, is proved, compiles to the same again, prints as itself.

    python -m tests.whole --count 10000
    python -m tests.whole --first 17 --count 1 --print

Number i of a seed is always the same program.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from compiler.compile import compile_program
from compiler.plan import Plan
from compiler.steps import TrainStep, UpdateLoop
from rlhf_dsl.ast import strip_spans
from rlhf_dsl.commands.fmt import formatted
from rlhf_dsl.diagnostics import DiagnosticError, Diagnostics
from rlhf_dsl.frontend import loads
from rlhf_dsl.parser import parse
from rlhf_dsl.source import Source
from tests.writing.models import desk
from tests.writing.plans import plan
from tests.writing.programs import Program, program

RANKS, AGAIN = (1, 2, 4), 2  # the ranks that are compiled for, and those for which twice
UNWRITTEN = ("E0404", "E0409", "E0406")  # the writer does not foresee these
JUSTIFIED = ("P0111",)


@dataclass(frozen=True)
class Found:
    """A program that did not do what it should, and why."""

    number: int
    reason: str
    text: str


def written(seed: int, number: int, plain: bool = False) -> tuple[Program, random.Random]:
    """Program `number` of a seed, and numbers for whatever else is chosen. plain: as the oracle evaluates it."""
    numbers = random.Random(f"{seed} {number}")
    return program(numbers, plain), numbers


def examine(number: int, one: Program, numbers: random.Random, folder: Path, seen: Counter) -> Iterator[Found]:
    """What is wrong, at most once. numbers: to choose plans by; seen: counts what happened."""
    path = str(folder / "program.rlflow")
    try:
        loads(one.text, {}, path)
    except DiagnosticError as error:
        codes = {d.code for d in error.diagnostics if d.severity == "error"}
        seen.update(f"check {code}" for code in codes)
        if not codes <= set(UNWRITTEN):
            yield Found(number, f"check: {error}", one.text)
        return
    except Exception:
        yield Found(number, traceback.format_exc(), one.text)
        return
    seen["checked"] += 1
    for ranks in RANKS:
        text = one.with_plan(plan(numbers, one, ranks))
        try:
            reason = printed_otherwise(Source(path, text)) or compiled(text, path, ranks, seen)
        except Exception:
            reason = traceback.format_exc()
        if reason:
            yield Found(number, f"{ranks} ranks: {reason}", text)
            return


def compiled(text: str, path: str, ranks: int, seen: Counter) -> str:
    """What is wrong with the compilation, or nothing."""
    try:
        made = compile_program(loads(text, {}, path), ranks=ranks)
    except DiagnosticError as error:
        codes = [d.code for d in error.diagnostics]
        seen.update(f"compile {code}" for code in codes)
        return "" if set(codes) <= set(JUSTIFIED) else f"compile: {error}"
    seen["compiled"] += 1
    seen["retain"] += retains(made)
    printed = made.to_json()
    if Plan.from_json(printed) != made:
        return "the plan reads as another"
    if ranks == AGAIN and compile_program(loads(text, {}, path), ranks=ranks).to_json() != printed:
        return "it compiles to another plan the second time"
    return ""


def retains(made: Plan) -> bool:
    """Whether some training goes on from a forward of the rollout."""
    bodies = (step.body for step in made.steps if isinstance(step, UpdateLoop))
    return any(isinstance(step, TrainStep) and step.retained != "" for body in bodies for step in body)


def printed_otherwise(source: Source) -> str:
    """What `fmt` does that it should not, or nothing."""
    form = Source(source.path, formatted(source))
    if strip_spans(parse(form, Diagnostics(form))) != strip_spans(parse(source, Diagnostics(source))):
        return "fmt changes the program"
    return "fmt changes its own output" if formatted(form) != form.text else ""


def campaign(seed: int, numbers: range, seen: Counter) -> Iterator[Found]:
    with tempfile.TemporaryDirectory() as folder:
        desk(Path(folder))
        for number in numbers:
            one, chosen = written(seed, number)
            yield from examine(number, one, chosen, Path(folder), seen)


def _command_line() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print", action="store_true", help="print each program")
    parser.add_argument("--save", metavar="FOLDER", help="where programs are kept that did not do as they should")
    args = parser.parse_args()
    began, wrong, seen = time.perf_counter(), 0, Counter()
    numbers = range(args.first, args.first + args.count)
    if args.print:
        print(*(written(args.seed, i)[0].text for i in numbers), sep="\n" + "-" * 80 + "\n")
    for found in campaign(args.seed, numbers, seen):
        wrong += 1
        print(f"{found.number}: {found.reason}", flush=True)
        if args.save:
            Path(args.save).mkdir(parents=True, exist_ok=True)
            (Path(args.save) / f"{args.seed}-{found.number}.rlflow").write_text(found.text)
    print(f"{args.count} programs, {wrong} faults, {time.perf_counter() - began:.0f} s", dict(seen))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(_command_line())
