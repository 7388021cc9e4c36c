"""An op for the golden programs; compiling reads its signature and never runs it."""
from rlhf_dsl import op


@op
def exact(response: str, answer: str) -> float:
    return float(response == answer)
