"""E04: training."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
)
