"""Python ops that random programs call."""

from rlhf_dsl import op


@op
def judge(response: str, modulus: int = 7, *, scale: float = 7.1) -> float:
    return sum(map(ord, response)) % modulus / scale


@op
def level(weight: float = 0.4) -> float:
    return weight + 0.1


@op
def scaled(xs: list[float]) -> list[float]:
    return [0.9 * x + 0.01 * i for i, x in enumerate(xs)]


@op
def shrink(x: float) -> float:
    return 0.37 * x + 0.01


@op
def total(xs: list[float]) -> float:
    return 0.5 * sum(xs)


@op
def high(x: float) -> bool:
    return x > 0.2719


@op
def turned(text: str) -> str:
    return text[::-1]
