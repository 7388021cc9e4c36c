"""How a person says that a field of a plan differs: by table and field, a sentence, or one for each of its two states."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Union

from compiler.plan import LayoutSpec
from compiler.reading.units import cut_text

Sentence = Union[str, tuple[str, str]]  # with {name}, {old} and {new}, as words {was} and {word}; (when it holds now, when no longer)

MODEL: Mapping[str, Sentence] = {
    "source": "{name} starts from {new} instead of {old}",
    "role": "{name} is a {word} instead of a {was}",
    "offload": ("{name} lies in the host's memory while it is idle", "{name} stays on its ranks while it is idle"),
    "optimizer": ("{name} is trained", "{name} is frozen"),
    "optimizer.lr.lr": "{name} learns at {new} instead of {old}",
    "optimizer.lr.kind": "the learning rate of {name} is {word} instead of {was}",
    "optimizer.lr.warmup": "the learning rate of {name} rises for {new} steps instead of {old}",
    "optimizer.lr.steps": "the learning rate of {name} falls over {new} steps",
    "optimizer.lr.low": "the learning rate of {name} falls to {new} instead of {old}",
    "optimizer.weight_decay": "the weight decay of {name} is {new} instead of {old}",
    "optimizer.max_grad_norm": "gradients of {name} are clipped at a norm of {new} instead of {old}",
}
RUN: Mapping[str, Sentence] = {
    "steps": "{name} ends after {new} iterations instead of {old}",
    "epochs": "{name} ends after {new} epochs of the data instead of {old}",
    "seed": "{name} has the seed {new} instead of {old}",
    "lag": ("{name} samples the next batch while models train on this one",
            "{name} samples a batch when models are done with the one before"),
}
STEP: Mapping[str, Sentence] = {
    "micro_batch": "{name}: micro-batches of {new} instead of {old}",
    "tokens": "{name}: micro-batches of {new} tokens instead of {old}",
    "recompute": ("{name} computes layers again in its backward pass", "{name} keeps activations for its backward pass"),
    "retained": ("{name} goes on from the activations of a forward of the rollout",
                 "{name} computes its forward pass anew"),
    "strategy": "{name} travel by {word} instead of {was}",
    "epochs": "{name}: {new} epochs instead of {old}",
    "minibatches": "{name}: {new} mini-batches instead of {old}",
    "temperature": "{name}: at a temperature of {new} instead of {old}",
}
DATA: Mapping[str, Sentence] = {"path": "rows over {name} come from {new} instead of {old}"}
UNSET = {"steps": (0,), "epochs": (0,), "micro_batch": (0,), "tokens": (0,)}  # what says that there is no limit


def said(table: Mapping[str, Sentence], field: str, name: str, old: Any, new: Any) -> Optional[str]:
    """The sentence of a field; None where there is none, as for a limit that came or went."""
    sentence = table.get(field)
    if sentence is None or not isinstance(sentence, tuple) and (not_set(field, old) or not_set(field, new)):
        return None
    if isinstance(sentence, tuple):
        return sentence[0 if new else 1].format(name=name)
    return sentence.format(name=name, old=told(old), new=told(new), was=old, word=new)


def not_set(field: str, value: Any) -> bool:
    return value is None or value in UNSET.get(field, ())


def told(value: Optional[Any]) -> str:
    """A value in a sentence; a field that holds its default is not written down."""
    if isinstance(value, (list, tuple, dict)):
        return f"({', '.join(map(told, value))})"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else f"{value}"


# ---- layouts -------------------------------------------------------------------------------------

ENGINES = {"": "its usual engine", "vllm": "vLLM"}
SWITCHES = {"sequence_parallel": "sequence parallelism", "sharded_optimizer": "a sharded optimizer"}


def layout_said(who: str, verb: str, old: LayoutSpec, new: LayoutSpec) -> Optional[str]:
    """`actor trains in tp4 pp1 dp1 instead of tp2 pp1 dp2, with a sharded optimizer`; None if it is cut and run alike."""
    words = [f"in {cut_text(new)} instead of {cut_text(old)}"] if cut_text(old) != cut_text(new) else []
    if old.precision != new.precision:
        words.append(f"in {new.precision} instead of {old.precision}")
    if old.engine != new.engine:
        words.append(f"with {_engine(new)} instead of {_engine(old)}")
    if old.chunks != new.chunks:
        words.append(f"with {new.chunks} runs of layers in each stage instead of {old.chunks}")
    for switch, what in SWITCHES.items():
        if getattr(old, switch) != getattr(new, switch):
            words.append(f"{'with' if getattr(new, switch) else 'without'} {what}")
    return f"{who} {verb} {', '.join(words)}" if words else None


def _engine(spec: LayoutSpec) -> str:
    return ENGINES.get(spec.engine, spec.engine)
