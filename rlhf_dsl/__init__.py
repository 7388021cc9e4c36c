"""The rlflow language: parsing, checking, formatting, diagnostics. Needs lark alone."""

from rlhf_dsl.ops import op

__all__ = ["op"]
