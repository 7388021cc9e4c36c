"""Makes the built-in models anew: random weights, then the project's own programs, then bf16.

    python programs/models/make.py --out FOLDER

writes FOLDER/tiny (`builtin:tiny`, by `programs/sft.rlflow`) and FOLDER/tiny-reward (`builtin:tiny-reward`, by
`programs/reward_model.rlflow`). The same seed gives the same data, initial weights and order of rows; the trained
weights agree to rounding, which differs between machines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent.parent


def rlflowc(*arguments: str) -> None:
    subprocess.run([sys.executable, "-P", "-m", "rlhf_dsl.cli", *arguments], check=True)


def train(program: str, base: Path, run: Path) -> Path:
    """Runs a program from `base`; the folder of the model that it saved last."""
    rlflowc("run", str(PROGRAMS / program), "-s", f"base={base}", "--run-dir", str(run))
    saved = sorted((run / "checkpoints").glob("step-*/*"))
    return saved[-1]


def to_bf16(folder: Path, out: Path) -> None:
    """Copies a model folder with its weights rounded to bf16."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PROGRAMS / "models", help="where the two folders go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlflow-models-") as work:
        initial = Path(work, "initial")
        subprocess.run([sys.executable, str(PROGRAMS / "models" / "make_tokenizer.py"), "--out", str(initial)], check=True)
        policy = train("sft.rlflow", initial / "tiny", Path(work, "sft"))
        to_bf16(policy, args.out / "tiny")
        to_bf16(train("reward_model.rlflow", policy, Path(work, "reward")), args.out / "tiny-reward")


if __name__ == "__main__":
    main()
