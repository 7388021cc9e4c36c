"""E01: names."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
)
