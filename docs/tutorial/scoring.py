"""The reward of the tutorial."""
from rlhf_dsl import op


@op
def correct(response: str, answer: str) -> float:
    """1 for the right answer, else 0."""
    return float(response.strip() == answer.strip())
