"""The sampler against Hugging Face models, and its draws against a plain loop."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from compiler.layout import ModelLayout
from compiler.shapes import shape_from_config
from compiler.weights import pieces
from rlhf_dsl.diagnostics import DiagnosticError
from runtime import draws
from runtime.engines.sampler import SamplerEngine, _Batch
from runtime.engines.sampler_cache import Cache
from runtime.engines.sampling import SamplingOptions, choose, invert, keep_top_k, keep_top_p
from runtime.sequences import Sequences, ragged_index
from tests.filling import fill

SIZES = dict(vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=40, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
             pad_token_id=0, attn_implementation="eager")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, head_dim=16),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "linear": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
}
PROMPTS = [torch.tensor(p) for p in ([1, 5, 6], [1], [1, 9, 8, 7, 6, 5, 4], [1, 5, 6, 7], [3, 3])]
ROWS = np.array([7, 0, 12, 3, 2 ** 40])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def build(name):
    """(Hugging Face model, engine with its weights)."""
    torch.manual_seed(0)
    config = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for key, value in model.named_parameters():
        if key.endswith("bias") or "norm" in key:
            torch.nn.init.normal_(value, 1.0 if "norm" in key else 0.0, 0.2)
    engine = SamplerEngine(shape_from_config(config.to_dict()), ModelLayout((0,)), 0)
    fill(engine.weights, pieces(engine.shape, "policy", ModelLayout((0,)), 0, "torch"), model.state_dict())
    return model, engine


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def rows_of(sequences: Sequences):
    """(prompt, response, log-probabilities) of each sequence, as lists."""
    for i in range(len(sequences)):
        own = sequences.select(torch.tensor([i]))
        cut = int(own.prompt_lengths)
        yield own.tokens[:cut].tolist(), own.tokens[cut:].tolist(), own.logprobs.tolist()


def by_hand(model, prompt, row, sample, options, seed=0, name="y", iteration=0):
    """One response by the definition: full forward passes, plain loops. → tokens, logprobs, truncated"""
    ids, out = list(prompt), []
    limit = min(options.max_tokens, model.config.max_position_embeddings - len(prompt))
    while len(out) < limit:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        plain = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        if len(out) < options.min_tokens:
            logits[list(options.stop_ids)] = -np.inf
        if options.temperature == 0:
            token = int(logits.argmax())
            out.append((token, plain[token]))
        else:
            p = np.exp((logits - logits.max()) / options.temperature)
            ranked = sorted(range(len(p)), key=lambda i: (-p[i], i))[:options.top_k or None]
            kept, total = [], sum(p[i] for i in ranked)
            for i in ranked:
                if sum(p[j] for j in kept) / total < options.top_p:
                    kept.append(i)
            total, u = sum(p[i] for i in kept), draws.uniform(seed, name, iteration, row, sample, len(out)).item()
            reached = 0.0
            for token in sorted(kept):
                reached += p[token]
                if reached > u * total:
                    break
            out.append((token, np.log(p[token] / total)))
        ids.append(token)
        if token in options.stop_ids:
            return [t for t, _ in out], [x for _, x in out], False
    return [t for t, _ in out], [x for _, x in out], True


OPTIONS = {
    "plain": SamplingOptions(max_tokens=9, stop_ids=(2,)),
    "hot": SamplingOptions(max_tokens=5, temperature=1.7, stop_ids=(2, 5, 7, 30), min_tokens=2),
    "filtered": SamplingOptions(max_tokens=6, temperature=0.8, top_k=9, top_p=0.7, stop_ids=(2, 3)),
    "greedy": SamplingOptions(max_tokens=9, temperature=0, stop_ids=(2, 17), min_tokens=1),
    "context": SamplingOptions(max_tokens=60, stop_ids=()),
}


@pytest.mark.parametrize("name, case", [("llama", case) for case in OPTIONS] + [
    ("qwen2", "plain"), ("qwen2", "greedy"), ("llama3", "context"), ("linear", "plain"),
    ("qwen3", "plain"), ("qwen3", "greedy"), ("mistral", "plain"), ("mistral", "context")])
def test_equals_the_definition(name, case):
    model, engine = build(name)
    options = OPTIONS[case]
    samples = 1 if case in ("greedy", "context") else 3
    made = engine.generate(PROMPTS, samples, ROWS, "y", 4, 11, options)
    assert len(made) == len(PROMPTS) * samples and made.own is None
    ended = set()
    for i, (prompt, response, logprobs) in enumerate(rows_of(made)):
        given, row = PROMPTS[i // samples].tolist(), int(ROWS[i // samples])
        want, want_logp, truncated = by_hand(model, given, row, i % samples, options, 11, "y", 4)
        assert prompt == given and response == want
        assert np.allclose(logprobs, want_logp, atol=1e-4), np.abs(np.subtract(logprobs, want_logp)).max()
        assert bool(made.truncated[i]) == truncated
        ended.add(truncated)
    assert case != "hot" or ended == {True, False}  # both kinds of end were seen


def test_greedy_equals_hugging_face_generate(llama):
    model, engine = llama
    made = engine.generate(PROMPTS, 1, ROWS, "y", 0, 0, SamplingOptions(max_tokens=12, temperature=0, stop_ids=(2,)))
    for prompt, response, _ in rows_of(made):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert theirs[0, len(prompt):].tolist() == response


def test_batch_and_order_do_not_matter(llama):
    _, engine = llama
    options = SamplingOptions(max_tokens=10, stop_ids=(2, 11, 12, 13))
    whole = engine.generate(PROMPTS, 4, ROWS, "y", 0, 5, options)
    assert len(set(whole.response_lengths.tolist())) > 3  # rows leave at different times
    row = engine._model.row_bytes(16) + 4 * 61
    for slots in (1, 3, 7):
        engine.cache_bytes = slots * row
        other = engine.generate(PROMPTS, 4, ROWS, "y", 0, 5, options)
        assert torch.equal(whole.tokens, other.tokens) and torch.equal(whole.truncated, other.truncated)
        assert torch.allclose(whole.logprobs, other.logprobs, atol=1e-5)
    engine.cache_bytes = 1 << 30
    turned = engine.generate(PROMPTS[::-1], 4, ROWS[::-1].copy(), "y", 0, 5, options)
    back = torch.arange(20).view(5, 4).flip(0).flatten()
    assert torch.equal(turned.select(back).tokens, whole.tokens)
    alone = engine.generate(PROMPTS[2:3], 2, ROWS[2:3], "y", 0, 5, options)
    assert torch.equal(alone.tokens, whole.select(torch.tensor([8, 9])).tokens)
    rest = engine.generate([PROMPTS[2], PROMPTS[0]], 2, ROWS[[2, 0]], "y", 0, 5, options, first_sample=np.array([2, 1]))
    assert torch.equal(rest.tokens, whole.select(torch.tensor([10, 11, 1, 2])).tokens)


def test_rows_that_give_way_lose_no_token(llama, monkeypatch):
    """The cache lengthens by few tokens at a time, and its memory is that of three whole rows."""
    _, engine = llama
    options = SamplingOptions(max_tokens=24, top_p=0.95)
    whole = engine.generate(PROMPTS, 4, ROWS, "y", 0, 5, options)
    monkeypatch.setattr("runtime.engines.sampler_cache.BLOCK", 2)
    sizes, gave_way = [], []
    plain_resize, plain_lengthen = Cache.resize, _Batch._lengthen

    def lengthen(batch):
        before = len(batch.active)
        plain_lengthen(batch)
        gave_way.append(before - len(batch.active))

    monkeypatch.setattr(Cache, "resize", lambda c, *size: sizes.append(size) or plain_resize(c, *size))
    monkeypatch.setattr(_Batch, "_lengthen", lengthen)
    monkeypatch.setattr(engine, "cache_bytes", 3 * (engine._model.row_bytes(30) + 4 * 61))
    other = engine.generate(PROMPTS, 4, ROWS, "y", 0, 5, options)
    assert torch.equal(whole.tokens, other.tokens) and torch.equal(whole.truncated, other.truncated)
    assert torch.allclose(whole.logprobs, other.logprobs, atol=1e-5)
    assert sum(gave_way) > 3 and max(s for s, _ in sizes) > 4  # short rows were more than whole ones would have been
    assert all(s * (engine._model.row_bytes(c) + 4 * 61) <= engine.cache_bytes for s, c in sizes)


def test_sharing_a_prompt_and_the_order_of_rows_do_not_matter(llama):
    """Whole groups, sample by sample, and rows shuffled: the same tokens, at the log-probabilities of a full forward."""
    model, engine = llama
    options = SamplingOptions(max_tokens=10, stop_ids=(2, 11), temperature=0.7)
    shared = engine.generate(PROMPTS, 3, ROWS, "y", 1, 5, options)
    apart = [engine.generate(PROMPTS, 1, ROWS, "y", 1, 5, options, first_sample=s) for s in range(3)]
    for s, alone in enumerate(apart):
        own = shared.select(torch.arange(5) * 3 + s)
        assert torch.equal(own.tokens, alone.tokens) and torch.allclose(own.logprobs, alone.logprobs, atol=1e-5)
    order = np.random.default_rng(0).permutation(5)
    turned = engine.generate([PROMPTS[i] for i in order], 3, ROWS[order], "y", 1, 5, options)
    back = torch.from_numpy((np.argsort(order)[:, None] * 3 + np.arange(3)).flatten())
    assert torch.equal(turned.select(back).tokens, shared.tokens)
    for prompt, response, logprobs in rows_of(shared):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1]
        full = (logits / 0.7).log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
        assert torch.allclose(full, torch.tensor(logprobs), atol=1e-5)


def test_names_of_the_draws_count(llama):
    _, engine = llama
    options = SamplingOptions(max_tokens=8)
    base = dict(samples=2, rows=ROWS, name="y", iteration=0, seed=0, options=options)
    first = engine.generate(PROMPTS, **base)
    assert torch.equal(engine.generate(PROMPTS, **base).tokens, first.tokens)
    for change in (dict(seed=1), dict(iteration=1), dict(name="z"), dict(rows=ROWS + 1)):
        assert not torch.equal(engine.generate(PROMPTS, **{**base, **change}).tokens, first.tokens)
    a, b = (first.select(torch.tensor([i])).tokens.tolist() for i in (0, 1))
    assert a != b


def test_stop_text(llama):
    _, engine = llama
    options = SamplingOptions(max_tokens=10, stop_ids=(2,))
    free = list(rows_of(engine.generate(PROMPTS, 2, ROWS, "y", 0, 0, options)))
    spell = lambda ids: "".join(chr(97 + i % 5) for i in ids)
    for minimum in (0, 4):
        options = SamplingOptions(max_tokens=10, stop_ids=(), stop_strings=("ab", "ce"), min_tokens=minimum)
        made = engine.generate(PROMPTS, 2, ROWS, "y", 0, 0, options, decode=spell)
        for (_, response, _), (_, longer, _), truncated in zip(rows_of(made), free, made.truncated.tolist()):
            text = spell(response)
            assert truncated == (text[-2:] not in ("ab", "ce")) and len(response) >= minimum
            assert not truncated or len(response) == 10
            assert all(i + 2 < minimum for i in range(len(text) - 2) if text[i:i + 2] in ("ab", "ce"))
            n = min(len(response), len(longer)) if 2 not in longer[:len(response)] else longer.index(2)
            assert response[:n] == longer[:n]


def test_progress_and_no_rows(llama):
    _, engine = llama
    seen = []
    engine.generate(PROMPTS, 2, ROWS, "y", 0, 0, OPTIONS["hot"], progress=lambda *counts: seen.append(counts))
    assert [t for _, t in seen] == [10] * len(seen) and sorted(seen) == seen
    none = engine.generate([], 4, np.zeros(0), "y", 0, 0, OPTIONS["plain"])
    assert len(none) == 0 and none.tokens.dtype == torch.int64 and none.logprobs.numel() == 0


def test_results_may_enter_autograd(llama):
    _, engine = llama
    made = engine.generate(PROMPTS, 1, ROWS, "y", 0, 0, OPTIONS["plain"])
    x = torch.ones(made.logprobs.numel(), requires_grad=True)
    (x * made.logprobs).exp().sum().backward()
    assert x.grad is not None and made.tokens[ragged_index(made.lengths, torch.tensor([0]))].numel()


@pytest.mark.parametrize("prompt, code, words", [
    (list(range(1, 41)), "R0313", "row 31 has 40 tokens"), ([], "R0314", "row 31")])
def test_prompts_that_do_not_fit(llama, prompt, code, words):
    with pytest.raises(DiagnosticError, match=f"{code}.*{words}"):
        llama[1].generate([[1, 2], prompt], 1, np.array([30, 31]), "y", 0, 0, OPTIONS["plain"])
    made = llama[1].generate([list(range(1, 40))], 1, np.array([0]), "y", 0, 0, OPTIONS["context"])
    assert made.response_lengths.tolist() == [1] and made.truncated.tolist() == [True]


def test_a_row_that_may_become_longer_than_there_is_memory_for(llama, monkeypatch):
    _, engine = llama
    options = SamplingOptions(max_tokens=10)
    enough = engine._model.row_bytes(12) + 4 * 61  # the last token of 3 + 10 is never read
    monkeypatch.setattr(engine, "cache_bytes", enough)
    assert engine.generate([[1, 2, 3]], 2, np.array([0]), "y", 0, 5, options).response_lengths.tolist() == [10, 10]
    monkeypatch.setattr(engine, "cache_bytes", enough - 1)
    with pytest.raises(DiagnosticError, match="R0317.*13 tokens"):
        engine.generate([[1, 2, 3]], 2, np.array([0]), "y", 0, 5, options)


# ---- choosing a token --------------------------------------------------------------------------

def test_filters_break_ties_by_lower_id():
    logp = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.2]], dtype=torch.float64).log()
    kept = lambda x: x.exp()[0].isfinite().logical_and(x[0] > -torch.inf).nonzero()[:, 0].tolist()
    assert [kept(keep_top_k(logp, k)) for k in (0, 1, 2, 3, 4, 9)] == [
        [0, 1, 2, 3, 4], [1], [1, 3], [1, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]]
    assert [kept(keep_top_p(logp, p)) for p in (0.01, 0.29, 0.31, 0.7, 0.85, 1.0)] == [
        [1], [1], [1, 3], [1, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]]
    assert torch.allclose(keep_top_p(logp, 0.5).exp()[0, [1, 3]], torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_inverse_of_the_cumulative_distribution():
    p = torch.tensor([[0, 0.25, 0, 0.5, 0.25, 0]], dtype=torch.float64)
    for u, token in ((0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2 ** -53, 4), (1.0, 4)):
        tokens, total = invert(p.clone(), torch.tensor([u], dtype=torch.float64))
        assert (tokens.tolist(), total.tolist()) == ([token], [1.0]), u
    odd = torch.full((1, 7), 0.1, dtype=torch.float64)
    assert invert(odd * 3, torch.tensor([1 - 2 ** -53], dtype=torch.float64))[0].item() == 6


def test_choosing_in_chunks_is_choosing(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(50, 17, generator=generator), torch.rand(50, generator=generator, dtype=torch.float64)
    may_end = torch.arange(50) % 2 == 0
    options = SamplingOptions(max_tokens=1, top_p=0.9, stop_ids=(3, 99))
    tokens, logp = choose(logits, u, options, may_end)
    monkeypatch.setattr("runtime.engines.sampling._CHUNK", 17 * 8)
    again = choose(logits, u, options, may_end)
    assert torch.equal(tokens, again[0]) and torch.equal(logp, again[1])
    assert not (tokens[1::2] == 3).any()
