"""E06: Python ops."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
)
