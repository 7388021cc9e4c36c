"""E02: dims and types."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
)
