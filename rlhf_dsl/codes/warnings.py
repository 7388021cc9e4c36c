"""W01: warnings."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
)
