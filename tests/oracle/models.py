"""Models by Hugging Face transformers in f32, one row at a time, and their optimizer by torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Optional

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from rlhf_dsl.typed import Model as ModelSpec
from rlhf_dsl.typed import Optimizer, Schedule
from tests.oracle.sampling import Response

logging.set_verbosity_error()
logging.disable_progress_bar()


class Tokens:
    """The tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        self.inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        generation = folder / "generation_config.json"
        config = json.loads((generation if generation.exists() else folder / "config.json").read_text())
        more = config.get("eos_token_id")
        ids = [self.inner.eos_token_id, *(more if isinstance(more, list) else [more])]
        self.ends = tuple(dict.fromkeys(i for i in ids if i is not None))

    def prompt(self, text: str) -> list[int]:
        if self.inner.chat_template:
            chat = [{"role": "user", "content": text}]
            return self.text(self.inner.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        return [*self.begin(), *self.text(text)]

    def begin(self) -> list[int]:
        return [] if self.inner.bos_token_id is None else [self.inner.bos_token_id]

    def text(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False)

    def response(self, ids: list[int], bound: int) -> tuple[list[int], bool]:
        """With one end token, or cut at the bound without one."""
        return (ids[:bound], True) if len(ids) >= bound else ([*ids, self.ends[0]], False)

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Model:
    """A policy, or a backbone under a scalar head that starts at zero where the folder has none.

    steps: optimizer steps of the whole run, for schedules that name no number of their own
    """

    def __init__(self, spec: ModelSpec, folder: Path, steps: int) -> None:
        kind = AutoModelForCausalLM if spec.role == "policy" else AutoModel
        self.net = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
        self.net.eval()
        self.spec, self.context = spec, self.net.config.max_position_embeddings
        self.backbone = self.net.model if spec.role == "policy" else self.net
        self.net.get_input_embeddings().padding_idx = None  # a token of that number is one that was drawn, and learns
        own = spec.role == "policy"
        self.head: Tensor = self.net.lm_head.weight if own else _score(folder, self.net.config.hidden_size)
        self.optimizer, self.taken, self.steps = None, 0, steps
        if spec.optimizer is not None:
            self.optimizer = _adamw(spec.optimizer, self.parameters())

    def parameters(self) -> list[Tensor]:
        return [*self.net.parameters(), *([] if self.spec.role == "policy" else [self.head])]

    def hidden(self, tokens: list[int]) -> Tensor:
        """f32 [n, hidden], after the last norm."""
        return self.backbone(input_ids=torch.tensor([tokens])).last_hidden_state[0]

    def logits_after(self, tokens: list[int]) -> Tensor:
        """f32 [V]: of the token that follows."""
        with torch.no_grad():
            return self.hidden(tokens)[-1] @ self.head.T

    def call(self, operation: str, response: Response, temperature: float) -> list[Tensor]:
        """f64 scalars: one for each token of the response, or one for it all."""
        n = len(response.prompt)
        states = self.hidden(response.prompt + response.tokens)
        predicting, reading = states[n - 1:-1], states[n:]
        if operation in ("logprobs", "entropy"):
            logp = torch.log_softmax((predicting @ self.head.T).double() / (temperature or 1), -1)
            if operation == "entropy":
                return [-(row.exp() * row).sum() for row in logp]
            return [row[token] for row, token in zip(logp, response.tokens)]
        at = {"values": predicting, "scores": reading, "score": states[-1:], "last_value": states[-1:]}[operation]
        return list((at @ self.head.T)[:, 0].double())

    # ---- training

    def differentiate(self, loss: Tensor) -> None:
        """The gradient of `loss` by this model alone; other models stay as they are."""
        parameters = self.parameters()
        if not loss.requires_grad:  # every token stood outside its clip range, say
            loss = 0.0 * self.head.sum()
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient.clone()  # a zero that stands for many elements is one number in memory

    def step(self) -> tuple[float, float]:
        """(learning rate, norm of the gradient before clipping)."""
        bound = self.spec.optimizer.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters(), bound or math.inf))
        rate = learning_rate(self.spec.optimizer.lr, self.taken, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1
        return rate, norm

    def weights(self) -> dict[str, Tensor]:
        """By the names of a causal model, or of one with a score; a tied head is not named again."""
        prefix = "" if self.spec.role == "policy" else "model."
        found = {prefix + name: p.detach().clone() for name, p in self.net.named_parameters()}
        return found if self.spec.role == "policy" else found | {"score.weight": self.head.detach().clone()}


def _score(folder: Path, hidden: int) -> Tensor:
    for file in folder.glob("*.safetensors"):
        found = load_file(file).get("score.weight")
        if found is not None:
            return found.float().requires_grad_()
    return torch.zeros(1, hidden, requires_grad=True)


def _adamw(spec: Optimizer, parameters: list[Tensor]) -> torch.optim.AdamW:
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=spec.lr.lr, betas=tuple(spec.betas), eps=spec.eps)


def learning_rate(schedule: Schedule, step: int, run_steps: int) -> float:
    """Rises over the first `warmup` steps, the last of which has the full rate; then constant, or down to `low`."""
    if step + 1 <= schedule.warmup:
        return schedule.lr * (step + 1) / schedule.warmup
    length = (schedule.steps or run_steps) - schedule.warmup
    done = min((step - schedule.warmup) / max(length, 1), 1)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule.kind]
    return schedule.low + left * (schedule.lr - schedule.low) if schedule.kind != "constant" else schedule.lr


def copied(source: Model, target: Model, decay: Optional[float] = None) -> None:
    """The target's weights become the source's, or move towards them by 1 - decay."""
    with torch.no_grad():
        for s, t in zip(source.parameters(), target.parameters()):
            t.copy_(s if decay is None else decay * t + (1 - decay) * s)
