"""Numbers as people read them."""

from __future__ import annotations

from typing import Iterable

from compiler.plan import LayoutSpec


def seconds_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-5 else f"{seconds * 1e6:.1f} us"


def bytes_text(size: float) -> str:
    return f"{size:.0f} B" if size < 1000 else f"{scaled(size)}B"


def scaled(value: float, unit: str = "") -> str:
    """`1.2 M`, `18.6 GFLOP`: decimal prefixes."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            return f"{value:.3g} {unit}".rstrip() if not prefix else f"{value:.1f} {prefix}{unit}"
        value /= 1000
    raise AssertionError("the last prefix takes all")


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def share_text(part: float, whole: float) -> str:
    share = part / whole if whole else 0.0
    return "less than 0.1 %" if 0 < share < 1e-3 else f"{share:.1%}".replace("%", " %")


def ranks_text(ranks: Iterable[int]) -> str:
    """`ranks 0-3`, `rank 0`, `ranks 0-3, 8-11`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {words}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {words}"


def cut_text(spec) -> str:
    return f"tp{spec.tp} pp{spec.pp} dp{spec.dp}"


def degrees_text(spec) -> str:
    """Of anything with tp, pp and dp; what is not as usual in how a layout's engine computes follows."""
    words = [cut_text(spec)]
    if isinstance(spec, LayoutSpec):
        words += [f"chunks{spec.chunks}"] * (spec.chunks > 1) + ["sequence-parallel"] * spec.sequence_parallel
        words += ["sharded-optimizer"] * spec.sharded_optimizer + [spec.precision] * (spec.precision != "fp32")
        words += [spec.engine] * bool(spec.engine)
    return " ".join(words)
