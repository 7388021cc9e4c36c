"""Models that the Megatron engine is tried on, and what Hugging Face computes with them in plain torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Mapping

import torch
from torch import Tensor

from compiler.shapes import FAMILIES, ModelShape, shape_from_config
from runtime.engines.base import OPERATIONS, SITES, AdamW
from runtime.sequences import Sequences

TEMPERATURE = 0.7
LEARNING_RATE, STEPS = 1e-3, 2
OPTIMIZER = AdamW(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
SIZES = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=67, max_position_embeddings=128, rms_norm_eps=1e-5,
)
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Scenario:
    """A model and its role; `config` overrides SIZES."""

    name: str
    family: str
    role: str
    config: Mapping[str, object]

    @property
    def hf(self) -> dict:
        return {**SIZES, **self.config}

    @property
    def shape(self) -> ModelShape:
        tied = {"tie_word_embeddings": self.hf.get("tie_word_embeddings", False)}
        return shape_from_config({**self.hf, **tied, "model_type": self.family})

    @property
    def operations(self) -> tuple[str, ...]:
        return OPERATIONS[self.role]


SCENARIOS = (
    Scenario("llama policy", "llama", "policy", {}),
    Scenario("qwen2 policy, tied", "qwen2", "policy", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    Scenario("llama value", "llama", "value", {}),
    Scenario("llama scorer, llama3 rope", "llama", "scorer", {"rope_theta": 1e4, "rope_scaling": LLAMA3}),
    Scenario("llama policy, 1 kv head", "llama", "policy", {"num_key_value_heads": 1}),
    Scenario("llama policy, 3 layers", "llama", "policy", {"num_hidden_layers": 3}),
    Scenario("llama policy, 5 layers", "llama", "policy", {"num_hidden_layers": 5}),
    Scenario("llama policy, 9 layers", "llama", "policy", {"num_hidden_layers": 9}),
    Scenario(
        "llama policy, tied, linear rope", "llama", "policy", {"tie_word_embeddings": True, "rope_scaling": LINEAR},
    ),
    Scenario("qwen3 policy", "qwen3", "policy", {"head_dim": 16, "rope_theta": 1e6}),
    Scenario("qwen3 value, 1 kv head", "qwen3", "value", {"head_dim": 16, "num_key_value_heads": 1}),
    Scenario("qwen2 scorer", "qwen2", "scorer", {}),
    Scenario("mistral policy, window", "mistral", "policy", {"sliding_window": 5, "head_dim": 12}),
    Scenario("mistral scorer", "mistral", "scorer", {"sliding_window": 4096}),
)


@dataclass(frozen=True)
class Expected:
    """folder with the weights before training, results by operation and row, norms of each step, weights after it

    rounding: how far the results are from those of the same model in bf16
    """

    folder: str
    results: dict[str, list[Tensor]]
    norms: list[float]
    trained: dict[str, Tensor]
    rounding: float


def rows(n: int = 7) -> Sequences:
    """n rows of different lengths, some of whose response tokens are not the model's own."""
    random = torch.Generator().manual_seed(3)
    prompts = torch.randint(1, 9, (n,), generator=random)
    responses = torch.randint(1, 12, (n,), generator=random)
    tokens = torch.randint(0, SIZES["vocab_size"], (int((prompts + responses).sum()),), generator=random)
    own = torch.rand(int(responses.sum()), generator=random) < 0.8
    own[torch.cumsum(responses, 0) - responses] = True
    return Sequences(tokens, prompts, responses, own)


def row_loss(outputs: Mapping[str, Tensor], first: int, lengths: Tensor) -> Tensor:
    """A sum over rows of something nonlinear in every output; row i of a batch has `lengths[i]` own tokens."""
    loss = torch.zeros(())
    for name, values in outputs.items():
        per_row = values.split(1 if SITES[name] == "last" else lengths.tolist())
        for i, row in enumerate(per_row):
            target = torch.linspace(-1, 1, row.numel()) + 0.1 * (first + i)
            loss = loss + ((row - target) ** 2).sum() + (row * target).sin().sum()
    return loss / 10


# ---- what must come out, on rank 0


def reference(scenario: Scenario, batch: Sequences, folder: str) -> Expected:
    model = hf_model(scenario)
    model.save_pretrained(folder, max_shard_size="1GB" if scenario is SCENARIOS[0] else "20KB")
    with torch.no_grad():
        results = hf_outputs(model, scenario, batch)
        rounded = hf_outputs(copy.deepcopy(model).bfloat16(), scenario, batch)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
    )
    norms = []
    for _ in range(STEPS):
        adamw.zero_grad()
        outputs = {name: torch.cat(values) for name, values in hf_outputs(model, scenario, batch).items()}
        row_loss(outputs, 0, batch.own_lengths).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)))
        adamw.step()
    trained = {name: p.detach() for name, p in model.named_parameters()}
    return Expected(folder, results, norms, trained, _farthest(results, rounded))


def _farthest(results: Mapping[str, list[Tensor]], others: Mapping[str, list[Tensor]]) -> float:
    return max(float((a - b).abs().max()) for name in results for a, b in zip(results[name], others[name]))


def hf_model(scenario: Scenario) -> torch.nn.Module:
    import transformers

    family = FAMILIES[scenario.family].architecture
    head = "ForCausalLM" if scenario.role == "policy" else "ForSequenceClassification"
    labels = {} if scenario.role == "policy" else {"num_labels": 1}
    torch.manual_seed(7)
    config = getattr(transformers, family + "Config")(**scenario.hf, **labels)
    model = getattr(transformers, family + head)(config).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(4.0)
    return model


def hf_outputs(model: torch.nn.Module, scenario: Scenario, batch: Sequences) -> dict[str, list[Tensor]]:
    """Per operation a tensor for each row, computed row by row."""
    found: dict[str, list[Tensor]] = {operation: [] for operation in scenario.operations}
    owns = batch.own.split(batch.response_lengths.tolist())
    for tokens, prompt, own in zip(batch.tokens.split(batch.lengths.tolist()), batch.prompt_lengths.tolist(), owns):
        hidden = model.model(tokens[None]).last_hidden_state[0]
        at = prompt + torch.nonzero(own).flatten()
        if scenario.role != "policy":
            scalars = model.score(hidden)[:, 0].float()
            sites = {"values": at - 1, "scores": at, "last_value": [-1], "score": [-1]}
            for operation in found:
                found[operation].append(scalars[sites[operation]])
            continue
        log_p = (model.lm_head(hidden[at - 1]).float() / TEMPERATURE).log_softmax(-1)
        found["logprobs"].append(log_p.gather(1, tokens[at, None])[:, 0])
        found["entropy"].append(-(log_p.exp() * log_p).sum(-1))
    return found
