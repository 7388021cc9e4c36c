"""Generation by vLLM, in the process of each rank: weights pushed in after each update, draws by seeds with names.

A response's seed follows from what it is for (`runtime.draws`), so a run repeats, bit by bit, in the same layout. In
another layout or batch vLLM may draw other tokens of the same distribution; `runtime.engines.sampler` does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterable, Optional, Sequence, Union

import numpy as np
import torch
from torch import Tensor

from compiler.cost.generation import MOST_SEQUENCES
from compiler.layout import ModelLayout
from compiler.shapes import FAMILIES, ModelShape
from compiler.weights import WeightLayout
from rlhf_dsl.diagnostics import fault
from runtime import draws
from runtime.engines import vllm_process
from runtime.engines.base import CACHE_BYTES
from runtime.engines.host import Host
from runtime.engines.sampling import SamplingOptions, check_prompts, completes_stop
from runtime.engines.vllm_weights import whole_tensors
from runtime.sequences import Sequences

PREFILL_TOKENS = 8192  # in one pass over prompts
BLOCK_TOKENS = 128  # at most in a block of the cache; a sequence fills whole blocks


class VLLMEngine:
    """The generating form of a policy on one rank of `layout`: an engine for each replica, whose ranks go in step.

    layout: pp = 1, shards in the order of ranks (`compiler.layout.in_rank_order`), as torch.distributed orders groups
    folder: holds the model's `config.json`; weights come by `weights` alone
    group: the torch.distributed group of the rank's tp peers, itself alone where tp = 1
    name: of this engine, unlike that of all others of the machine
    cache_bytes: bound on the memory for keys and values, of which two whole sequences have room in any case
    sleeps: it can `offload`, which a GPU alone allows
    Raises R0138 if vLLM does not take the model. Construction is collective over the tp peers.
    """

    def __init__(
        self, shape: ModelShape, folder: Path, layout: ModelLayout, rank: int, group: Any, name: str,
        dtype: torch.dtype = torch.float32, device: torch.device = torch.device("cpu"), cache_bytes: int = CACHE_BYTES,
        sleeps: bool = False,
    ) -> None:
        self.away: set[str] = set()
        self.shape, self._rank, self._dtype, self._device = shape, rank, dtype, device
        self._layout = WeightLayout(shape, "policy", layout, "vllm")
        self._arriving: Optional[dict[str, Tensor]] = None
        at = layout.coordinates(rank)
        self._inside = vllm_process.Inside(group, device)
        self.cache_bytes = _cache_bytes(shape, layout.tp, dtype, cache_bytes)
        arguments = dict(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, generation_config="vllm",
            hf_overrides={"architectures": [f"{FAMILIES[shape.family].architecture}ForCausalLM"]},
            dtype=str(dtype).removeprefix("torch."), tensor_parallel_size=layout.tp, seed=0,
            max_model_len=shape.max_positions, max_num_seqs=MOST_SEQUENCES["vllm"], enable_prefix_caching=True,
            max_num_batched_tokens=max(PREFILL_TOKENS, shape.max_positions),
            kv_cache_memory_bytes=self.cache_bytes,
            logprobs_mode="processed_logprobs", enable_sleep_mode=sleeps)
        try:
            self._engine = vllm_process.start(self._inside, f"{name}-{at.dp}", at.tp, device, **arguments)
            self._runner = self._engine.model_executor.driver_worker.worker.model_runner
            self._check_heads()
        except (ValueError, NotImplementedError) as error:
            raise fault("R0138", folder=folder, reason=" ".join(str(error).split())) from error

    def _check_heads(self) -> None:
        """Raises ValueError for a width that vLLM's attention does not compute; on a CPU it does not look itself."""
        width = self.shape.head_dim
        for backend in (group.backend for groups in self._runner.attn_groups for group in groups):
            if not backend.supports_head_size(width):
                known = ", ".join(map(str, backend.get_supported_head_sizes()))
                raise ValueError(f"its heads are {width} wide, {backend.get_name()} computes widths of {known}")

    # ---- weights

    @property
    def weights(self) -> dict[str, Tensor]:
        """This rank's local tensors (`compiler.weights`, engine "vllm"), for someone to fill in place.

        vLLM keeps weights in a form of its own: the next `generate` brings these into it and lets go of them.
        """
        if self._arriving is None:
            sizes = self._layout.local_tensors(self._rank)
            self._arriving = {n: torch.empty(size, dtype=self._dtype, device=self._device) for n, size in sizes.items()}
        return self._arriving

    def _take_over(self) -> None:
        """Weights that have arrived since the last time become vLLM's."""
        arrived, self._arriving = self._arriving, None
        if arrived is None:
            return
        tensors = {"weights_iterator": whole_tensors(self._layout, self._rank, arrived), "is_checkpoint_format": True}
        self._engine.collective_rpc("reload_weights", kwargs=tensors)
        if self.shape.tied:
            head = self._runner.get_model().lm_head  # a layer of its own, whose packed form the loader leaves as it was
            head.quant_method.process_weights_after_loading(head)

    # ---- what leaves the device: on a GPU, where it has not run; on a CPU a plan that asks for it is refused (R0169)

    def offload(self, parts: Iterable[str], host: Host, version: Optional[int]) -> None:
        """vLLM sleeps: without its cache, its weights in the host's memory by its own means, or nowhere if they come anew."""
        if self.away:
            return
        with self._inside.running():
            self._engine.sleep(level=2 if version is None else 1)
        self.away.update(parts)

    def reload(self, parts: Iterable[str]) -> None:
        if not self.away:
            return
        with self._inside.running():
            self._engine.wake_up()
        self.away.clear()

    # ---- generation

    @property
    def keys_and_values(self) -> list[Tensor]:
        """The memory of the cache; layers may share one."""
        return self._runner.kv_caches

    def generate(
        self, prompts: Sequence[Union[Tensor, Sequence[int]]], samples: int, rows, name: str, iteration: int, seed: int,
        options: SamplingOptions, decode: Optional[Callable[[list[int]], str]] = None,
        progress: Optional[Callable[[int, int], None]] = None, first_sample=0,
    ) -> Sequences:
        """As `SamplerEngine.generate`, but for which tokens are drawn."""
        tokens = [np.asarray(p, dtype=np.int64) for p in prompts]
        rows = np.asarray(rows, dtype=np.int64)
        check_prompts(tokens, rows, self.shape.max_positions)
        places = np.broadcast_to(np.asarray(first_sample, dtype=np.int64), rows.shape)[:, None] + np.arange(samples)
        keys = draws.key(seed, name, iteration, np.repeat(rows, samples), places.reshape(-1))
        with self._inside.running(), torch.inference_mode():
            self._take_over()
            # Keys and values of prompts seen before are of other weights, or would make tokens depend on what was seen.
            self._engine.reset_prefix_cache()
            # At temperature 0 the language asks for the plain softmax, also where ends are forbidden.
            self._runner.sampler.logprobs_mode = "processed_logprobs" if options.temperature else "raw_logprobs"
            drawn = _Responses(self._engine, tokens, samples, keys, options, decode, self.shape)
            while drawn.step():
                if progress is not None:
                    progress(drawn.finished, drawn.total)
        return drawn.sequences()


class _Responses:
    """Responses in the making. Sample s belongs to prompt s // samples."""

    def __init__(
        self, engine: Any, prompts: list[np.ndarray], samples: int, keys: np.ndarray, options: SamplingOptions,
        decode: Optional[Callable[[list[int]], str]], shape: ModelShape,
    ) -> None:
        self._engine, self._options, self._decode, self._shape = engine, options, decode, shape
        self.total, self.finished = len(prompts) * samples, 0
        self._prompts = [prompt for prompt in prompts for _ in range(samples)]
        self._tokens: list[list[int]] = [[] for _ in range(self.total)]
        self._logprobs: list[list[float]] = [[] for _ in range(self.total)]
        self._stopped = np.zeros(self.total, dtype=bool)
        for i, key in enumerate(keys.tolist()):
            prompt = {"type": "token", "prompt_token_ids": self._prompts[i].tolist()}
            engine.add_request(str(i), prompt, self._params(len(self._prompts[i]), key))

    def _params(self, prompt_tokens: int, key: int) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        options = self._options
        most = min(options.max_tokens, self._shape.max_positions - prompt_tokens)
        return SamplingParams(
            temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=key >> 1, ignore_eos=True,
            stop_token_ids=[i for i in options.stop_ids if i < self._shape.vocab], max_tokens=most,
            min_tokens=min(options.min_tokens, most), logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA if options.stop_strings else RequestOutputKind.FINAL_ONLY)

    def step(self) -> bool:
        """One pass of vLLM. False when all is done."""
        if not self._engine.has_unfinished_requests():
            return False
        for answer in self._engine.step():
            self._accept(int(answer.request_id), answer.outputs[0], answer.finished)
        return True

    def _accept(self, sample: int, output: Any, finished: bool) -> None:
        """Takes in what is new of a response, and ends it where it completes a stop text."""
        for token, logprob in zip(output.token_ids, output.logprobs.logprobs):
            self._tokens[sample].append(token)
            self._logprobs[sample].append(logprob)
        self._stopped[sample] |= finished and output.finish_reason == "stop"
        if not self._stopped[sample] and self._completes(sample):
            self._stopped[sample] = True
            self._engine.abort_request([str(sample)])
            finished = True
        self.finished += finished

    def _completes(self, sample: int) -> bool:
        tokens, options = self._tokens[sample], self._options
        if not options.stop_strings or len(tokens) < options.min_tokens:
            return False
        return completes_stop(np.array(tokens, dtype=np.int64), options, self._decode)

    def sequences(self) -> Sequences:
        parts = [np.zeros(0, dtype=np.int64)]
        for prompt, response in zip(self._prompts, self._tokens):
            parts += [prompt, np.array(response, dtype=np.int64)]
        fields = (
            np.concatenate(parts), np.array([len(p) for p in self._prompts], dtype=np.int64),
            np.array([len(t) for t in self._tokens], dtype=np.int64),
            np.array([x for row in self._logprobs for x in row], dtype=np.float32), ~self._stopped)
        tokens, prompts, responses, logprobs, truncated = map(torch.from_numpy, fields)
        return Sequences(tokens, prompts, responses, logprobs=logprobs, truncated=truncated)


def _cache_bytes(shape: ModelShape, tp: int, dtype: torch.dtype, bound: int) -> int:
    """What so many whole sequences need, within the bound; vLLM needs room for one."""
    token = 2 * shape.layers * max(shape.kv_heads // tp, 1) * shape.head_dim * dtype.itemsize
    sequence = token * -(-shape.max_positions // BLOCK_TOKENS) * BLOCK_TOKENS
    return max(min(bound, MOST_SEQUENCES["vllm"] * sequence), 2 * sequence)
