"""What the runtime asks of an engine: one model on the ranks of one layout.

Notation in the docstrings: n sequences in a batch, k = `batch.own_lengths.sum()` own tokens in it. Each data-parallel
rank passes its own rows; the tensor- and pipeline-parallel ranks of one data-parallel rank pass the same ones. All
methods are collective over the layout's ranks, and an engine lives on those ranks only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable, Mapping, Optional, Protocol, Sequence

import torch
from torch import Tensor

from runtime.engines.host import Host
from runtime.hf_folder import HFFolder
from runtime.sequences import Sequences

# operation → where its hidden states stand: "predict" at the token before each own token, "token" at each own token,
# "last" at the last token of the sequence
SITES = {
    "logprobs": "predict", "entropy": "predict", "values": "predict",
    "scores": "token",
    "last_value": "last", "score": "last",
}
CACHE_BYTES = 1 << 30  # for keys and values on a rank, where a plan does not say
MOMENTS, MASTER = ("exp_avg", "exp_avg_sq"), "master"
OPERATIONS = {
    "policy": ("logprobs", "entropy"),
    "value": ("values", "last_value"),
    "scorer": ("score", "scores"),
}


@dataclass(frozen=True)
class Call:
    """One operation of a model on a batch.

    temperature: of the distribution whose log-probabilities or entropy are taken, logits / temperature; 0 means the
    unscaled distribution. Other operations ignore it.
    """

    operation: str
    batch: Sequences
    temperature: float = 1.0


# objective(i, outputs): outputs of the calls of micro-batch i by name → the scalar to minimize
Objective = Callable[[int, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay (arXiv 1711.05101) on matrices only; clipping of the global gradient norm, 0 = none.

    The learning rate is not here: each step is given its own.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Execution:
    """How an engine computes. It decides on memory and speed; on results only by rounding.

    dtype: of parameters and activations; below 32 bits a trained model keeps its parameters in 32 bits beside them
    sequence_parallel: between layers tensor-parallel ranks hold a part of the tokens each
    sharded_optimizer: data-parallel ranks hold a part of the optimizer's states each (ZeRO-1, arXiv 1910.02054)
    """

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    sharded_optimizer: bool = False


class Engine(Protocol):
    """A model that computes its operations and, if it has an optimizer, trains."""

    def forward(
        self, batch: Sequences, operations: tuple[str, ...], temperature: float = 1.0,
        runs: Sequence[tuple[int, int]] = (), retain: bool = False,
    ) -> Optional[dict[str, Tensor]]:
        """The operations on `batch` by one forward pass, without gradients.

        runs: (start, stop) of the sequences that go through the model together, one after the other over the batch; () = all
        retain: activations stay, those of each run, for a `train` that goes on from them; those of an earlier forward go
        Returns f32 by operation on the last pipeline stage (the same on each tensor-parallel rank), None elsewhere, in
        the host's memory, where rows are at home:
        [k] for an operation per token, own tokens in the order of the batch, [n] for one per response.
        """

    def train(
        self, micro_batches: Sequence[Mapping[str, Call]], objective: Objective, recompute: bool = False,
        retained: bool = False,
    ) -> Optional[list[dict[str, Tensor]]]:
        """One forward and backward over all micro-batches.

        recompute: a layer keeps its input alone, and backward computes it again
        retained: the micro-batches are the runs of the last forward that retained, whose activations are used up; the
        weights are still the same, and there is one pipeline stage

        Adds the gradient of `objective(i, outputs)`, a scalar to minimize, of every micro-batch to the accumulated
        gradients, as a plain sum; `step` sums over data-parallel ranks. `objective` is called on the last pipeline
        stage only, with outputs in the host's memory. The number of micro-batches may differ between data-parallel
        ranks, down to none; a call may have no rows.
        Returns the outputs, detached, of each micro-batch on the last pipeline stage, None elsewhere.
        """

    def zero_grad(self) -> None:
        """Forgets the accumulated gradients."""

    def step(self, lr: float) -> float:
        """One AdamW step on the accumulated gradients, summed over data-parallel ranks.

        Returns their global norm before clipping. The gradients are spent: `zero_grad` comes before the next `train`.
        """

    def export(self) -> dict[str, Tensor]:
        """The live parameters of this rank, without gradient, by the names of `compiler.weights.local_tensors`.

        Writing to them writes the model; whoever keeps one copies it.
        """

    def load(self, folder: HFFolder, moment: str = "") -> None:
        """Reads this rank's pieces, of the parameters or of one of `moments`. Raises what `HFFolder.read_into` raises."""

    @property
    def moments(self) -> tuple[str, ...]:
        """What the optimizer keeps of each parameter, in 32 bits; `MASTER` is the parameter itself."""

    def moment(self, name: str) -> dict[str, Tensor]:
        """One of `moments`, whole, by the names of `export`; whoever keeps it copies it."""

    def load_moment(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Copies what `moment` gave, in the same layout, back; with `MASTER` the parameters follow."""

    optimizer_steps: int
    """How many steps the optimizer has made."""

    away: set[str]
    """The parts that have left: until they are back, nothing that needs them is called."""

    def offload(self, parts: Iterable[str], host: Host, version: Optional[int]) -> None:
        """Parts (`compiler.offloading.PARTS`) give up their memory; what has left already is left alone.

        version: what the content of weights and states is known by, so that it is copied once; None: it is worth
        nothing. Tensors that were handed out stay the same objects. Raises R0168.
        """

    def reload(self, parts: Iterable[str]) -> None:
        """Parts that have left are where they were, as they were; what was worth nothing is 0."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters."""

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of what this rank keeps of `moments`."""
