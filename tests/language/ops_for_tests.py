"""Ops whose signatures the pages beside this file read. Importing this module fails: nobody may."""

from rlhf_dsl import F32, Text, op

raise RuntimeError("a signature was read by running user code")


@op
def exact(response: str, answer: str, weight: float) -> float:
    return weight * (response.strip() == answer)


@op
def digits(response: str) -> list[float]:
    return [float(c.isdigit()) for c in response]


@op(batched=True, timeout=30)
def diversity(responses: Text["b g"]) -> F32["b g"]:
    return [[len(set(group)) / len(group)] * len(group) for group in responses]


@op
def mean_of(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


@op
def near(response: str, answer: str = "1", tolerance: float = 0.5, *, base: int = 10) -> float:
    return float(abs(int(response, base) - int(answer, base)) <= tolerance)


def plain(response: str) -> float:
    return 0.0


@op
def bare(response) -> float:
    return 0.0


@op
def odd(response: bytes) -> float:
    return 0.0


@op(timeout=0)
def late(response: str) -> float:
    return 0.0


@op
def spread(*responses: str) -> float:
    return 0.0
