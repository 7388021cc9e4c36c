"""What tests of the compiler share: programs as text, small model folders, a cluster that is the same everywhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from compiler.cluster import Cluster
from compiler.compile import compile_program
from compiler.machine import SINGLE, Engine, Machine, Reached
from compiler.offloading import with_offloading
from compiler.plan import Plan
from rlhf_dsl.frontend import load, loads
from rlhf_dsl.typed import Checked

PROGRAMS = Path(__file__).parent.parent / "programs"
CLUSTER = Cluster("test", (Machine("test", 1, 8, 1e12, 16e9, 1e11, 1e10, 1e9, 1e10, 1e-5, 1e-5,
                                   Reached(1.0, 1.0, 1.0, 1.0), Engine(1e-5, 1e-5, 0.0), SINGLE),))
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 96, "eos_token_id": 1, "bos_token_id": 2,
    "tie_word_embeddings": True,
}

GROUPS = '''
dim b = 8
dim g = 4
dim t <= 16
param base = "MODEL"
data prompts[b] = jsonl("prompts.jsonl", "prompt")
model actor = policy(base) trained by adamw(lr=1e-4)
model ref = policy(base)
model critic = value(base) trained by adamw(lr=1e-4)
model reward = scorer(base)
'''


def model_folder(path: Path, **changes) -> Path:
    """A folder with the config of a model and no weights: enough to plan with."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


def checked_text(tmp_path: Path, text: str, **overrides: str) -> Checked:
    """A checked program in `tmp_path`, whose MODEL is a folder there."""
    model_folder(tmp_path / "model")
    return loads(text.replace("MODEL", "model"), overrides, str(tmp_path / "program.rlflow"))


def compiled(tmp_path: Path, text: str, ranks: int | None = 2, cluster: Cluster = CLUSTER, **overrides: str) -> Plan:
    return compile_program(checked_text(tmp_path, text, **overrides), cluster, ranks)


def offloaded(plan: Plan, *models: str) -> Plan:
    """The plan that a search would have made which offloads these models, or all."""
    asked = {name: dataclasses.replace(spec, offload=name in (models or plan.models)) for name, spec in plan.models.items()}
    return with_offloading(dataclasses.replace(plan, models=asked))


def shipped(tmp_path: Path, name: str, **overrides: str) -> Checked:
    """A program that comes with the project, on a small model of the test."""
    folder = str(model_folder(tmp_path / "model"))
    return load(PROGRAMS / f"{name}.rlflow", {"base": folder} | overrides)
