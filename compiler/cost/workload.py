"""What an iteration asks of its models: calls in stages. Plain numbers, so that nothing else is needed to plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from compiler.cost.transition import Way, way_of
from compiler.shapes import ModelShape

GENERATE, FORWARD, TRAIN = "generate", "forward", "train"


@dataclass(frozen=True)
class Asked:
    """What `plan:` fixes of a model; 0 is open.

    tp, pp, dp: of training and scoring; generate_tp, generate_dp: of generation; devices: of its set
    generate_engine, reshard: as `engine` and `strategy` of `plan.LayoutSpec`
    micro_batch, tokens: the most that a micro-batch of training may hold
    recompute: "full" or "none"; precision, optimizer, sequence_parallel: as in `machine.Storage.asked`; "" and None
    are open
    """

    tp: int = 0
    pp: int = 0
    dp: int = 0
    generate_tp: int = 0
    generate_dp: int = 0
    generate_engine: str = ""
    reshard: str = ""
    devices: int = 0
    micro_batch: int = 0
    tokens: int = 0
    recompute: str = ""
    precision: str = ""
    optimizer: str = ""
    sequence_parallel: Optional[bool] = None

    @property
    def way(self) -> Way:
        """How weights come to generation."""
        return way_of(self.reshard, self.generate_engine)


@dataclass(frozen=True)
class PlacedModel:
    """A model to be placed. role: as in `compiler.shapes.ROLES`."""

    name: str
    role: str
    shape: ModelShape
    trained: bool = False
    asked: Asked = Asked()


@dataclass(frozen=True)
class Call:
    """One use of a model in an iteration, over `rows` samples of `prompt` and `response` tokens on average.

    longest: tokens of the longest response; 0: all are as long as the average
    minibatches: optimizer steps an epoch; every sample is seen `epochs` times
    samples: how many rows of a generation have one prompt, which passes through the model once
    together: samples that neither micro-batches nor data shards part in training: a pair, or a row with its group
    counted: whether its time counts; that of evaluations does not, but there must be memory for them
    """

    model: str
    kind: str
    rows: int
    prompt: float
    response: float
    longest: float = 0.0
    epochs: int = 1
    minibatches: int = 1
    samples: int = 1
    together: int = 1
    counted: bool = True

    @property
    def length(self) -> float:
        """Tokens of a sample."""
        return self.prompt + self.response

    @property
    def steps(self) -> float:
        """Decoding steps until the last sample ends."""
        return max(self.longest, self.response)

    @property
    def tail(self) -> float:
        """By how many times the mean the longest response is longer than it."""
        return self.steps / self.response - 1


@dataclass(frozen=True)
class Stage:
    """Calls without order among them; a stage begins when the one before has ended (HybridFlow, section 6)."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Workload:
    """together: pairs of models that must share their devices; alone: sets that share theirs with no other model."""

    models: tuple[PlacedModel, ...]
    stages: tuple[Stage, ...]
    together: tuple[tuple[str, str], ...] = ()
    alone: tuple[tuple[str, ...], ...] = ()

    def calls(self, model: str) -> tuple[tuple[int, Call], ...]:
        """(index of its stage, call) of all calls of a model."""
        return tuple((i, c) for i, stage in enumerate(self.stages) for c in stage.calls if c.model == model)


def ppo(shapes: dict[str, ModelShape], rows: int, prompt: float, response: float, minibatches: int, epochs: int = 1,
        recompute_logprobs: bool = True, roles: Optional[dict[str, str]] = None) -> Workload:
    """Generation, scoring, and training of what is a policy `actor` or a value model.

    roles: by model; default: actor and ref are policies, names with `critic` value models, the rest scorers
    recompute_logprobs: whether the actor scores its own samples with its training engine
    """
    roles = roles or {name: _role(name) for name in shapes}
    models = tuple(PlacedModel(name, roles[name], shape, name == "actor" or roles[name] == "value")
                   for name, shape in shapes.items())
    call = dict(rows=rows, prompt=prompt, response=response)
    scored = [m.name for m in models if m.name != "actor" or recompute_logprobs]
    trained = [m.name for m in models if m.trained]
    return Workload(models, (
        Stage("generation", (Call("actor", GENERATE, **call),)),
        Stage("scoring", tuple(Call(name, FORWARD, **call) for name in scored)),
        Stage("training", tuple(Call(name, TRAIN, **call, epochs=epochs, minibatches=minibatches) for name in trained)),
    ))


def _role(name: str) -> str:
    if name in ("actor", "ref"):
        return "policy"
    return "value" if "critic" in name else "scorer"
