"""E05: params, overrides, settings."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
)
