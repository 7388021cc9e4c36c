"""`rlflowc eval`: reads program and feed, evaluates one iteration, prints the answer (`rlflow.eval/1`)."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any, Iterator

import torch

from compiler.compile import lower_and_place, program_folder
from compiler.emit import Target, emit
from compiler.exprs import walk
from compiler.local import local_cluster
from compiler.placement import place
from compiler.plan import Plan
from compiler.shapes import ModelShape
from rlhf_dsl.ast import Span
from rlhf_dsl.frontend import load
from rlhf_dsl.source import Source
from rlhf_dsl.terminal import put_json, show
from rlhf_dsl.typed import Bind, Checked, Constraint, Expr
from runtime.feeds import differences
from runtime.feeds.answer import answer_of
from runtime.feeds.executor import FeedExecutor
from runtime.feeds.feed import Feed, read_feed
from runtime.feeds.text import answer_text
from runtime.world import SoloWorld, World, run_threads

DTYPES = {"f64": torch.float64, "f32": torch.float32}
SHAPE = ModelShape("llama", 1, 1, 1, 1, 1, 1, 1)  # of every model: none is there


def eval_command(args: Namespace) -> int:
    """args: program, feed, set, dp, micro_batch, no_shuffle, dtype, check_grad, json."""
    torch.set_num_threads(1)  # the numbers are few: threads would only wait for each other
    feed = read_feed(args.feed)
    checked = load(args.program, {**{k: str(v) for k, v in feed.dims.items()}, **args.set})
    show(checked.warnings, args.color)
    answer = evaluated(checked, feed, args.dp, args.micro_batch or 0, DTYPES[args.dtype], not args.no_shuffle)
    checks = _compared(checked, feed, answer, args) if args.check_grad else None
    if args.json:
        put_json(answer if checks is None else answer | {"check_grad": [check.to_json() for check in checks]})
    else:
        print(answer_text(answer) + ("" if checks is None else differences.differences_text(checks)), end="")
    differences.refuse_wrong(checks or (), Source(checked.path, checked.text))
    return 0


def evaluated(checked: Checked, feed: Feed, shards: int = 1, micro_batch: int = 0, dtype: torch.dtype = torch.float64,
              shuffle: bool = True) -> dict[str, Any]:
    """The answer (`rlflow.eval/1`). micro_batch: rows, 0 for all; shuffle: the rows of mini-batches."""
    plan = plan_for_feed(checked, feed, shards, micro_batch)

    def shard(world: World) -> dict[str, Any]:
        executor = FeedExecutor(plan, checked, world, feed, dtype, shuffle)
        executor.run_iteration(1)
        return answer_of(executor)

    return run_threads(shards, shard)[0]


def _compared(checked: Checked, feed: Feed, answer: dict[str, Any], args: Namespace) -> tuple[differences.Checked, ...]:
    plan, shuffle = plan_for_feed(checked, feed, 1, 0), not args.no_shuffle
    executor = FeedExecutor(plan, checked, SoloWorld(), feed, torch.float64, shuffle)
    executor.run_iteration(1)
    return differences.compared(executor, answer, args.dtype)


def plan_for_feed(checked: Checked, feed: Feed, shards: int, micro_batch: int) -> Plan:
    """The plan of a program without models: every one on `shards` data shards, whatever the program asks for.

    All bound values for which the feed has the numbers are computed, whether anything needs them or not.
    """
    trained = [m.name for m in checked.models.values() if m.optimizer]
    rows = (("micro_batch", micro_batch),) if micro_batch else ()
    limits = tuple(Constraint(name, "train", rows, Span()) for name in trained if rows)
    one = dataclasses.replace(checked.run, lag=0)  # an iteration alone has nothing to do for the next
    checked = dataclasses.replace(checked, constraints=limits, run=one)
    shapes = dict.fromkeys(checked.models, SHAPE)
    placement = place(checked, shapes, local_cluster(), shards)
    graph = lower_and_place(checked, placement, wanted=frozenset(_bound_and_fed(checked, feed)))
    return emit(checked, graph, Target("", placement, str(program_folder(checked.path)), shapes))


def _bound_and_fed(checked: Checked, feed: Feed) -> Iterator[Expr]:
    lines = (line for section in (checked.rollout, *(u.body for u in checked.updates)) for line in section)
    for bind in lines:
        if isinstance(bind, Bind) and bind.expr.type.elem != "tokens" and all(map(feed.has, walk(bind.expr))):
            yield bind.expr
