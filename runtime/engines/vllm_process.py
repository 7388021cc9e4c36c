"""vLLM in a process that it does not own.

When it starts, it reseeds the random generators, builds its process groups over all ranks there are, keeps them in
globals of a module, and takes `torch.set_num_threads` away. While it samples, it draws from the generators, and with an
engine it ends the default process group. `Inside` lets it do so among the ranks of one engine and puts everything back.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from typing import Any, Iterator

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's loop runs in the process that calls it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
WITHOUT_GPU = {"TORCHDYNAMO_DISABLE": "1"}  # else the first call compiles for most of a minute
FIRST_GROUP = 1 << 20  # groups are named by their number; those of vLLM start far from where other ranks count
GROUPS_AN_ENGINE = 1 << 10


def load() -> Any:
    """The module `vllm`, imported with `SETTINGS`; those that the user has set stay."""
    for name, value in (SETTINGS if torch.cuda.is_available() else SETTINGS | WITHOUT_GPU).items():
        os.environ.setdefault(name, value)
    import vllm
    from vllm import sampling_params
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = _nothing  # it destroys the default group, which is not vLLM's
    sampling_params._MAX_TEMP = 0.0  # under which it lifts temperatures
    return vllm


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Inside:
    """The surroundings of one engine, around everything that runs vLLM's code. Construction is collective over `group`.

    group: the ranks of the engine, which vLLM takes for all there are; device: where it carries tensors
    """

    _made = 0  # on this rank

    def __init__(self, group: Any, device: torch.device) -> None:
        number = torch.tensor(Inside._made, device=device)
        c10d.all_reduce(number, c10d.ReduceOp.MAX, group=group)  # some of the ranks may have made more engines before
        self._group = group
        self._state: dict[str, Any] = {}
        self._first = FIRST_GROUP + int(number) * GROUPS_AN_ENGINE
        Inside._made = int(number) + 1

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        with _generators(), _threads(), self._default_group(), self._vllm_groups():
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Leaves the default group alone: meanwhile another thread of the rank may talk to all ranks."""
        with _generators(), self._vllm_groups():
            yield

    @contextlib.contextmanager
    def _default_group(self) -> Iterator[None]:
        """Numbers of groups go on as on ranks without vLLM, as later groups are named by them."""
        outside, count = c10d._world.default_pg, c10d._world.group_count
        c10d._update_default_pg(self._group)
        c10d._world.group_count = self._first
        try:
            yield
        finally:
            self._first = c10d._world.group_count
            c10d._update_default_pg(outside)
            c10d._world.group_count = count

    @contextlib.contextmanager
    def _vllm_groups(self) -> Iterator[None]:
        """Engines of different layouts in one process: each finds its own groups."""
        from vllm.distributed import parallel_state

        table = vars(parallel_state)
        names = [name for name in table if name.startswith("_") and name.isupper()]
        before = {name: table[name] for name in names}
        table.update(self._state)
        try:
            yield
        finally:
            self._state = {name: table[name] for name in names}
            table.update(before)


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    set_threads, count = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != count:
            set_threads(count)


def start(inside: Inside, name: str, place: int, device: torch.device, **arguments: Any) -> Any:
    """A vLLM engine on the ranks of `inside`, which all call this.

    name: of the engine's shared memory, unlike those of all other engines of the machine; place: of this rank in it
    Raises what vLLM raises for a model or arguments that it does not take, mostly ValueError.
    """
    vllm = load()
    with inside.starting():
        engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(
            distributed_executor_backend=_executor(name, place, device), enforce_eager=True, async_scheduling=False,
            disable_log_stats=True, **arguments))
    gc.unfreeze()  # it took everything that lives in this process out of the garbage collector's sight
    return engine


def _executor(name: str, place: int, device: torch.device) -> type:
    """vLLM's executor for ranks that something else started: each runs the whole engine with its part of the model."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class RankExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            # Nobody connects to this address, as the groups are there; its end is what vLLM names shared memory by.
            return f"tcp://127.0.0.1:{name}", place, device.index or 0

    return RankExecutor
