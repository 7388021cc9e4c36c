"""Our sampler against Hugging Face `generate` and vLLM: the same weights, prompts and lengths, in 32 bits.

    python benchmarks/sampling.py [--vllm PYTHON] [--rounds 5] [--threads 2] [--tokens 128]

32 prompts of 16 tokens, 128 tokens after each, a model of 8 million parameters, medians of interleaved rounds. vLLM
takes part where the interpreter PYTHON (this one, if not given) has it. Also printed: the share of our time that is not
in the matrix products of the model, those of attention included, found by doing them again, alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from contenders import Contender, environment, interleave, serve, spread
from made import PROMPT_TOKENS, model_folder, prompts

PROMPTS = 32


def token_ids(folder: Path) -> list[list[int]]:
    from runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder)
    ids = [tokenizer.encode_prompt(text) for text in prompts(PROMPTS)]
    assert {len(each) for each in ids} == {PROMPT_TOKENS}
    return ids


# ---- contenders: each returns a function that generates everything once and returns the number of tokens


def ours(folder: Path, threads: int, tokens: int):
    import numpy as np
    import torch

    from compiler.layout import ModelLayout
    from compiler.shapes import shape_from_config
    from compiler.weights import WeightLayout
    from runtime.engines.sampler import SamplerEngine
    from runtime.engines.sampling import SamplingOptions
    from runtime.hf_folder import HFFolder

    torch.set_num_threads(threads)
    shape, alone = shape_from_config(json.loads((folder / "config.json").read_text())), ModelLayout((0,))
    engine = SamplerEngine(shape, alone, 0)
    HFFolder(folder).read_into(engine.weights, WeightLayout(shape, "policy", alone, "torch"), 0)
    ids, options = token_ids(folder), SamplingOptions(max_tokens=tokens)

    def generate() -> int:
        made = engine.generate(ids, 1, np.arange(PROMPTS), "y", 0, 0, options)
        return int(made.response_lengths.sum())

    return generate


def hugging_face(folder: Path, threads: int, tokens: int):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(token_ids(folder))

    def generate() -> int:
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
        return made[:, PROMPT_TOKENS:].numel()

    return generate


def vllm(folder: Path, threads: int, tokens: int):
    import torch

    from runtime.engines.vllm_process import SETTINGS, WITHOUT_GPU

    os.environ |= SETTINGS | WITHOUT_GPU
    torch.set_num_threads(threads)
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=PROMPT_TOKENS + tokens, max_num_seqs=PROMPTS,
        kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False, disable_log_stats=True)
    ids = [{"prompt_token_ids": each} for each in token_ids(folder)]
    options = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0)

    def generate() -> int:
        return sum(len(made.outputs[0].token_ids) for made in engine.generate(ids, options, use_tqdm=False))

    return generate


CONTENDERS = {"ours": ours, "hugging-face": hugging_face, "vllm": vllm}


def work(name: str, folder: Path, threads: int, tokens: int) -> None:
    generate = CONTENDERS[name](folder, threads, tokens)
    assert generate() == PROMPTS * tokens  # also warms up

    def one_round() -> float:
        began = time.perf_counter()
        generate()
        return time.perf_counter() - began

    serve(one_round, share_outside(generate) if name == "ours" else None)


def share_outside(generate) -> float:
    """The share of a generation that its own matrix products, done again on the same tensors, do not take."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    products = ("aten.linear", "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm",
                "mkldnn._linear_pointwise")
    done = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func).rsplit(".", 1)[0].rstrip("_") in products:
                done.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorded():
        generate()
    assert done

    def products_alone() -> None:
        with torch.inference_mode():
            for func, args, kwargs in done:
                func(*args, **kwargs)

    shares = []
    for _ in range(3):
        began = time.perf_counter()
        generate()
        between = time.perf_counter()
        products_alone()
        shares.append(1 - (time.perf_counter() - between) / (between - began))
    return statistics.median(shares)


# ---- the benchmark


def has_vllm(python: str) -> bool:
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-c", found]).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return work(chosen.worker[0], Path(chosen.worker[1]), chosen.threads, chosen.tokens)
    with tempfile.TemporaryDirectory() as scratch:
        compare(model_folder(Path(scratch) / "model"), chosen)


def compare(folder: Path, chosen: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    pythons = {"ours": sys.executable, "hugging-face": sys.executable}
    if has_vllm(chosen.vllm):
        pythons["vllm"] = chosen.vllm
    else:
        print(f"vLLM is left out: {chosen.vllm} does not have it (`make vllm`, or --vllm PYTHON)")
    env = environment(chosen.threads)
    contenders = [
        Contender(name, [python, __file__, "--threads", str(chosen.threads), "--tokens", str(chosen.tokens),
                         "--worker", name, str(folder)], env)
        for name, python in pythons.items()]
    taken = interleave(contenders, chosen.rounds)
    table = Table("contender", "seconds", "tokens/s", "ours is faster by")
    best = statistics.median(taken["ours"])
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        table.add_row(name, spread(seconds), f"{PROMPTS * chosen.tokens / middle:.0f}", f"{middle / best:.2f}")
    Console().print(table)
    print(f"of our time outside the model's matrix products: {contenders[0].ready:.1%}")
    for contender in contenders:
        contender.close()


if __name__ == "__main__":
    main()
