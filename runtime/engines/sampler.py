"""Generation by the project's own sampler: batched decoding whose tokens depend on nothing but what is asked for.

Rows enter the batch as there is room for them and leave it with their last token, so no step computes for a finished
row. The samples of a prompt share its one pass through the model. The cache holds the tokens that are there, not those
that may come; where it grows out of its memory, some rows give way and are read again later. Every random number has a
name (`runtime.draws`), so the order, the batch and the layout do not matter.
"""

from __future__ import annotations

from typing import Callable, Iterable, Optional, Sequence, Union

import numpy as np
import torch
from torch import Tensor

from compiler.layout import ModelLayout
from compiler.reading.units import bytes_text
from compiler.shapes import ModelShape
from compiler.weights import local_tensors
from rlhf_dsl.diagnostics import fault
from runtime.draws import Draws
from runtime.engines.base import CACHE_BYTES
from runtime.engines.host import Offloads
from runtime.engines.sampler_cache import grown
from runtime.engines.sampler_model import SamplerModel
from runtime.engines.sampling import SamplingOptions, check_prompts, choose, completes_stop
from runtime.sequences import Sequences

_PREFILL_TOKENS = 8192  # tokens, filling included, in one pass over prompts


class SamplerEngine(Offloads):
    """The generating form of a policy on one rank of `layout` (pp = 1).

    weights: the rank's local tensors (`compiler.weights`, engine "torch"), zeros until someone fills them in place
    group: the torch.distributed group of the rank's tp peers, None where tp = 1
    cache_bytes: memory for keys, values and logits; it bounds how many rows are decoded together. On a CPU the weights are
        there twice while it generates, where they fit in a quarter of it
    """

    def __init__(
        self, shape: ModelShape, layout: ModelLayout, rank: int, group=None, dtype: torch.dtype = torch.float32,
        device: torch.device = torch.device("cpu"), cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__()
        sizes = local_tensors(shape, "policy", layout, rank, "torch")
        self.shape, self.cache_bytes = shape, cache_bytes
        self.weights = {name: torch.zeros(size, dtype=dtype, device=device) for name, size in sizes.items()}
        at = layout.coordinates(rank)
        peers = tuple(layout.rank(at.dp, at.pp, t) for t in range(layout.tp))
        self._model = SamplerModel(shape, self.weights, at.tp, peers, group)

    def export(self) -> dict[str, Tensor]:
        """The live local tensors, by name."""
        return self.weights

    def tensors_of(self, part: str) -> Iterable[Tensor]:
        """Keys and values have no memory but while it generates."""
        return self.weights.values()

    def generate(
        self, prompts: Sequence[Union[Tensor, Sequence[int]]], samples: int, rows, name: str, iteration: int, seed: int,
        options: SamplingOptions, decode: Optional[Callable[[list[int]], str]] = None,
        progress: Optional[Callable[[int, int], None]] = None, first_sample=0,
    ) -> Sequences:
        """Draws `samples` responses to each prompt. Collective over the tp peers, which all pass and get the same.

        rows: int64 [prompts], positions of the root rows in their data stream
        first_sample: int64 [prompts] or one for all, the place in its row's group of the first sample of each prompt
        name, iteration, seed: what the draws are named by; decode: tokens → text, needed for `options.stop_strings`
        progress: called with (finished, all) sequences
        Returns sequences ordered by prompt, then sample. A response ends with an end token, with the token that
        completes a stop text, or, truncated, at max_tokens or the end of the context.
        Raises R0313 for a prompt that leaves the context no room, R0314 for one without tokens, R0317 for one that may
        become longer than there is memory for.
        """
        tokens = [np.asarray(p, dtype=np.int64) for p in prompts]
        rows = np.asarray(rows, dtype=np.int64)
        check_prompts(tokens, rows, self.shape.max_positions)
        places = np.broadcast_to(np.asarray(first_sample, dtype=np.int64), rows.shape)[:, None] + np.arange(samples)
        draws = Draws(seed, name, iteration, np.repeat(rows, samples), places.reshape(-1))
        batch = _Batch(self._model, tokens, samples, draws, options, decode, self.cache_bytes)
        batch.check_room()
        with torch.inference_mode(), self._model.unchanging(self.cache_bytes // 4):
            while batch.step():
                if progress is not None:
                    progress(batch.finished, batch.total)
        return batch.sequences()


class _Batch:
    """Responses in the making. Sample s belongs to prompt s // samples; `active[i]` is the sample in slot i.

    Of an active sample all tokens but the last drawn one are in the cache.
    """

    def __init__(
        self, model: SamplerModel, prompts: list[np.ndarray], samples: int, draws: Draws, options: SamplingOptions,
        decode: Optional[Callable[[list[int]], str]], cache_bytes: int,
    ) -> None:
        self.model, self.prompts, self.samples = model, prompts, samples
        self.draws, self.options, self.decode = draws, options, decode
        self.total = len(prompts) * samples
        lengths = np.array([len(p) for p in prompts], dtype=np.int64)
        self.prompt_lengths = np.repeat(lengths, samples)
        self.limits = np.minimum(options.max_tokens, model.shape.max_positions - self.prompt_lengths)
        self.tokens = np.zeros((self.total, options.max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((self.total, options.max_tokens), dtype=np.float32)
        self.counts = np.zeros(self.total, dtype=np.int64)
        self.truncated = np.zeros(self.total, dtype=bool)
        self.ends = np.array(options.stop_ids, dtype=np.int64)
        self.active = np.zeros(0, dtype=np.int64)
        self.waiting = self._by_length(np.arange(self.total))
        self.cache, self.cache_bytes = model.cache(), cache_bytes
        self.longest = int((self.prompt_lengths + self.limits).max(initial=1)) - 1  # the last token is never read

    def _by_length(self, samples: np.ndarray) -> np.ndarray:
        """Longest first: neighbours are of like length and share a pass with little filling."""
        return samples[np.argsort(-self._lengths(samples), kind="stable")]

    def _lengths(self, samples: np.ndarray) -> np.ndarray:
        return self.prompt_lengths[samples] + self.counts[samples]

    def check_room(self) -> None:
        """Raises R0317 unless there is memory for one row as long as any may become."""
        needed = self._row_bytes(self.longest)
        if needed > self.cache_bytes:
            raise fault("R0317", tokens=self.longest + 1, needed=bytes_text(needed), cache=bytes_text(self.cache_bytes))

    def _row_bytes(self, capacity: int) -> int:
        return self.model.row_bytes(capacity) + 4 * self.model.shape.vocab

    def _slots(self, capacity: int) -> int:
        """How many rows of so many tokens there is memory for."""
        return min(self.total, self.cache_bytes // self._row_bytes(capacity))

    def _capacity(self, samples: np.ndarray) -> int:
        return min(self.longest, grown(int(self._lengths(samples).max())))

    @property
    def finished(self) -> int:
        return self.total - len(self.waiting) - len(self.active)

    def step(self) -> bool:
        """Takes in waiting samples if there is room for a good number of them, else draws a token for every active one.
        False when all is done."""
        if len(self.waiting):
            capacity = self._capacity(np.append(self.active, self.waiting[0]))
            slots = self._slots(max(capacity, self.cache.capacity if len(self.active) else 0))
            room = min(slots - len(self.active), len(self.waiting))
            if not len(self.active) or room > 0 and room >= min(len(self.waiting), slots // 8):
                self._admit(room, capacity)
                return True
        if len(self.active):
            self._advance()
        return bool(len(self.waiting) or len(self.active))

    def _admit(self, room: int, capacity: int) -> None:
        """Reads up to `room` waiting samples into slots of at least `capacity` tokens."""
        first, width = len(self.active), int(self._lengths(self.waiting[:1])[0])
        # A prompt's samples share one line, but those that have tokens of their own: they gave way before.
        begun = self.counts[self.waiting[:room]] > 0
        lines, sharing = _runs(np.where(begun, -self.waiting[:room] - 1, self.waiting[:room] // self.samples))
        sharing = sharing[:max(1, _PREFILL_TOKENS // width)]
        taken, self.waiting = np.split(self.waiting, [sharing.sum()])
        padded = np.zeros((len(sharing), width), dtype=np.int64)
        readers = taken[np.cumsum(sharing) - sharing]
        for line, sample in zip(padded, readers):
            line[:self._lengths(sample)] = np.append(
                self.prompts[sample // self.samples], self.tokens[sample, :self.counts[sample]])
        if not first or capacity > self.cache.capacity or first + len(taken) > self.cache.slots:
            self.cache.resize(min(self._slots(capacity), first + len(taken) + len(self.waiting)), capacity)
        lengths = torch.from_numpy(self._lengths(readers))
        logits = self.model.prefill(torch.from_numpy(padded), lengths, self.cache, first, torch.from_numpy(sharing))
        self.active = np.append(self.active, taken)
        self._accept(first, logits)

    def _advance(self) -> None:
        if self._lengths(self.active).max() > self.cache.capacity:
            self._lengthen()
        now = self.active
        last = self.tokens[now, self.counts[now] - 1]
        positions = self._lengths(now) - 1
        self._accept(0, self.model.decode(torch.from_numpy(last), torch.from_numpy(positions), self.cache))

    def _lengthen(self) -> None:
        """Longer slots; the last rows give way where there is no memory for all."""
        capacity = self._capacity(self.active)
        self.active, given_way = np.split(self.active, [min(len(self.active), self._slots(capacity))])
        self.waiting = self._by_length(np.append(given_way, self.waiting))
        self.cache.resize(min(self._slots(capacity), len(self.active) + len(self.waiting)), capacity)

    def _accept(self, first: int, logits: Tensor) -> None:
        """Draws the next token of the samples in the slots from `first` on, whose logits these are."""
        now, options = self.active[first:], self.options
        places = self.counts[now]
        may_end = None
        if places.min() < options.min_tokens:
            may_end = torch.from_numpy(places >= options.min_tokens).to(logits.device)
        u = torch.from_numpy(self.draws.at(now, places)).to(logits.device)
        tokens, logprobs = (x.cpu().numpy() for x in choose(logits, u, options, may_end))
        self.tokens[now, places], self.logprobs[now, places] = tokens, logprobs
        self.counts[now] += 1
        ended = (tokens[:, None] == self.ends).any(1) | self._stopped(now)
        full = self.counts[now] >= self.limits[now]
        self.truncated[now] = full & ~ended
        self._retire(np.concatenate([np.zeros(first, dtype=bool), full | ended]))

    def _stopped(self, samples: np.ndarray) -> np.ndarray:
        """bool [m]: the last token completed a stop text."""
        if not self.options.stop_strings:
            return np.zeros(len(samples), dtype=bool)
        return np.array([self._completes(s) for s in samples], dtype=bool)

    def _completes(self, sample: int) -> bool:
        count = int(self.counts[sample])
        return count >= self.options.min_tokens and completes_stop(self.tokens[sample, :count], self.options, self.decode)

    def _retire(self, done: np.ndarray) -> None:
        """Frees the slots that are done: the last slots move into the gaps, so the active ones stay together."""
        if not done.any():
            return
        kept = len(done) - int(done.sum())
        gaps, movers = np.flatnonzero(done[:kept]), kept + np.flatnonzero(~done[kept:])
        if len(gaps):
            moved = self.active[movers]
            tokens = int(self._lengths(moved).max()) - 1
            self.cache.move(torch.from_numpy(movers), torch.from_numpy(gaps), tokens)
            self.active[gaps] = moved
        self.active = self.active[:kept]

    def sequences(self) -> Sequences:
        real = np.arange(self.tokens.shape[1]) < self.counts[:, None]
        parts = [np.zeros(0, dtype=np.int64)]
        for s in range(self.total):
            parts += [self.prompts[s // self.samples], self.tokens[s, :self.counts[s]]]
        fields = (np.concatenate(parts), self.prompt_lengths, self.counts, self.logprobs[real], self.truncated)
        tokens, prompts, responses, logprobs, truncated = (torch.from_numpy(x) for x in fields)
        return Sequences(tokens, prompts, responses, logprobs=logprobs, truncated=truncated)


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each run of equal values once, and the lengths of the runs."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.diff(np.append(starts, len(values)))
