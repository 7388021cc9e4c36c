"""The rlflow language: parsing, checking, formatting, diagnostics. Needs lark alone."""

from rlhf_dsl.ops import F32, Bool, Text, op

__all__ = ["op", "F32", "Bool", "Text"]
