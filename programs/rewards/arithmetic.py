"""Rewards for arithmetic that a program can check."""
from rlhf_dsl import op


@op
def exact_match(response: str, answer: str) -> float:
    """1 if the response, but for surrounding blanks, is the answer, else 0."""
    return float(response.strip() == answer.strip())
