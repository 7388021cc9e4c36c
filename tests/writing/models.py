"""A desk with everything that random programs read: data, ops, and models, with weights or without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.writing import writing_ops

TOKENIZER = Path(__file__).resolve().parents[2] / "programs" / "models" / "tiny"
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 104, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}
NAMES = ("one", "two", "head")  # two policies that differ, and a model with a scalar head


def desk(folder: Path, weights: bool = False) -> Path:
    """Fills `folder`, which may be new."""
    for seed, name in enumerate(NAMES):
        path = folder / "models" / name
        path.mkdir(parents=True)
        if weights:
            _save(path, seed, name == "head")
        else:
            (path / "config.json").write_text(json.dumps(CONFIG))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, path)
    shutil.copy(writing_ops.__file__, folder)
    rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b), "other": str(a * b), "weight": a / 7 - b / 11,
             "good": (a + b) % 3 == 0} for a in range(5) for b in range(5))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _save(path: Path, seed: int, head: bool) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    sizes = {k: v for k, v in CONFIG.items() if k != "model_type"}
    if head:
        LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1, initializer_range=0.2)).save_pretrained(path)
    else:
        LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2)).save_pretrained(path)
