"""An estimate and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from compiler.reading.units import share_text

SMALL = 0.05  # parts below this share are not told


class Part(NamedTuple):
    """why: what the seconds are made of, `3.2 TFLOP at 50.0 GFLOP/s`"""

    seconds: float
    why: str


@dataclass(frozen=True)
class Estimate:
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def reason(self) -> str:
        """The parts that matter, the longest first, with their shares if they are several; "" if there are none."""
        found = sorted((p for p in self.parts if p.seconds > SMALL * self.seconds), key=lambda p: -p.seconds)
        if len(found) == 1:
            return found[0].why
        return "; ".join(f"{part.why} ({share_text(part.seconds, self.seconds)})" for part in found)


def estimate(*parts: tuple[float, str]) -> Estimate:
    """Of (seconds, why), without those that take no time."""
    return Estimate(tuple(Part(*part) for part in parts if part[0]))
