"""E03: models, roles and operations."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
)
