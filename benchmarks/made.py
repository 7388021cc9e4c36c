"""The model and the prompts that the benchmarks share: a Llama of 8 million parameters, and prompts of words."""

from __future__ import annotations

import json
import random
from pathlib import Path

VOCAB, PROMPT_TOKENS = 4096, 16
WORDS = [f"w{i}" for i in range(3, VOCAB)]


def model_folder(folder: Path, seed: int = 0, head: str = "policy") -> Path:
    """A folder as `transformers` writes it, of random weights. head: "policy", "value" or "scorer"."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024, initializer_range=0.02, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, num_labels=1)
    model = (LlamaForCausalLM if head == "policy" else LlamaForSequenceClassification)(config)
    model.float().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer():
    """One word, one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def prompts(count: int, seed: int = 0) -> list[str]:
    """Texts of `PROMPT_TOKENS` tokens each."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=PROMPT_TOKENS)) for _ in range(count)]


def write_prompts(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts(count)))
