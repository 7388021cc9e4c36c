"""What training computes in its own way equals torch's plain operations, results and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.engines import blocks, megatron_linear, megatron_vocabulary
from runtime.engines.megatron_attention import take
from runtime.engines.megatron_linear import linear
from runtime.engines.megatron_mlp import swiglu
from runtime.engines.megatron_norm import RMSNorm
from runtime.engines.megatron_scores import attended
from runtime.engines.megatron_vocabulary import logprobs_and_entropy
from runtime.engines.positions import window_mask

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def leaf(*size: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(size) * scale).requires_grad_()


def gradients(results: list[Tensor], weights: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return torch.autograd.grad(sum((r * w).sum() for r, w in zip(results, weights)), leaves)


def assert_alike(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [1, 7 * 24, 1 << 20], ids=["one row", "some rows", "all rows"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_distribution_of_logits_in_blocks(monkeypatch, block: int, temperature: float, with_entropy: bool) -> None:
    monkeypatch.setitem(megatron_vocabulary._BLOCK, "cpu", block)
    logits, targets = leaf(37, 24, scale=6), torch.randint(20, (37,))
    found = logprobs_and_entropy(logits, targets, 20, temperature, ALONE, with_entropy)
    exact = logits.detach().double().requires_grad_()
    log_p = (exact[:, :20] / (temperature or 1.0)).log_softmax(-1)
    wanted = [log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
    count = 2 if with_entropy else 1
    results, wanted, weights = list(found[:count]), wanted[:count], [torch.randn(37), torch.randn(37)]
    assert_alike(results, wanted)
    assert_alike(gradients(results, weights, [logits]), gradients(wanted, weights, [exact]))


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("block", [1, 5 * 49, 1 << 18], ids=["one head", "some heads", "all heads"])
def test_attention_over_short_rows(monkeypatch, window: int, kv_heads: int, block: int) -> None:
    monkeypatch.setattr(blocks, "NUMBERS", block)
    made = [leaf(3, 7, heads, 8) for heads in (4, kv_heads, kv_heads)]
    grids, mask = [x.transpose(1, 2) for x in made], window_mask(window, 7, torch.device("cpu"))
    plain = F.scaled_dot_product_attention(*grids, attn_mask=mask, is_causal=mask is None, scale=0.3, enable_gqa=True)
    found, weights = attended(*grids, mask, 0.3), [torch.randn(3, 4, 7, 8)]
    assert_alike([found], [plain])
    assert_alike(gradients([found], weights, made), gradients([plain], weights, made))


@pytest.mark.parametrize("large", [0, 1 << 26], ids=["oneDNN", "torch"])
def test_linear(monkeypatch, large: int) -> None:
    monkeypatch.setattr(megatron_linear, "_LARGE", large)
    x, weight, bias, weights = leaf(6, 1, 5), leaf(4, 5), leaf(4), [torch.randn(6, 1, 4)]
    found, plain = linear(x, weight, bias), F.linear(x, weight, bias)
    assert_alike([found], [plain])
    assert_alike(gradients([found], weights, [x, weight, bias]), gradients([plain], weights, [x, weight, bias]))


def test_linear_of_no_rows(monkeypatch) -> None:
    monkeypatch.setattr(megatron_linear, "_LARGE", 0)
    x, weight = leaf(0, 1, 5), leaf(4, 5)
    found = linear(x, weight)
    assert found.shape == (0, 1, 4)
    assert_alike(gradients([found], [found], [weight]), [torch.zeros(4, 5)])


def test_linear_adds_to_the_accumulated_gradient() -> None:
    x, weight, grad = leaf(6, 1, 5), torch.nn.Parameter(torch.randn(4, 5)), torch.randn(6, 1, 4)
    weight.main_grad = torch.ones(4, 5)
    linear(x, weight).backward(grad)
    assert weight.grad is None
    assert_alike([weight.main_grad], [1 + torch.einsum("tbo,tbi->oi", grad, x)])


@pytest.mark.parametrize("block", [1, 20, 1 << 17], ids=["one row", "some rows", "all rows"])
def test_swiglu(monkeypatch, block: int) -> None:
    monkeypatch.setattr(blocks, "NUMBERS", block)
    wide, weights = leaf(6, 1, 10), [torch.randn(6, 1, 5)]
    found, plain = swiglu(wide), F.silu(wide[..., :5]) * wide[..., 5:]
    assert_alike([found], [plain])
    assert_alike(gradients([found], weights, [wide]), gradients([plain], weights, [wide]))


@pytest.mark.parametrize("block", [1, 10, 1 << 17], ids=["one row", "some rows", "all rows"])
def test_rms_norm(monkeypatch, block: int) -> None:
    monkeypatch.setattr(blocks, "NUMBERS", block)
    x, weight, weights = leaf(7, 1, 5), leaf(5), [torch.randn(7, 1, 5)]
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False), 5, 1e-5)
    norm.weight = torch.nn.Parameter(weight.detach().clone())
    found, plain = norm(x), F.rms_norm(x, (5,), weight, 1e-5)
    assert_alike([found], [plain])
    assert_alike(gradients([found], weights, [x, norm.weight]), gradients([plain], weights, [x, weight]))


def test_rows_that_are_taken() -> None:
    x, places, weights = leaf(6, 3), torch.tensor([1, 2, 5]), [torch.randn(3, 3)]
    assert_alike(gradients([take(x, places)], weights, [x]), gradients([x[places]], weights, [x]))
