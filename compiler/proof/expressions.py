"""Whether each row of a plan's table of expressions is what its primitive makes of its arguments.

Element types and dims follow from those of the arguments and from the plan's tables, so that a row that was changed, or
that refers to another one than it did, is found wherever the two differ in type.
"""

from __future__ import annotations

import math
import re
from typing import Any, Iterator, Optional

from compiler import names
from compiler.plan import DimSpec, ExprRow, Plan
from rlhf_dsl.builtins import OPERATIONS, PRIMITIVES
from rlhf_dsl.typed import ELEMENTS

LOGICAL = ("and", "or", "not")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
TEXTS = ("name", "model", "operation", "column", "field", "phase", "text")
COUNTS = ("keep", "top_k", "max_tokens", "min_tokens", "id")
FLAGS = ("local", "unbiased")
FIELD_TYPES = {"logprobs": "f32", "truncated": "bool", "text": "text"}


def expression_faults(plan: Plan) -> Iterator[str]:
    """Rows that do not fit; their references lead to rows above them, and the names in them are in the tables."""
    phases = {"", *names.phase_order(sum(step.op == "update" for step in plan.steps), len(plan.evals))}
    for i, row in enumerate(plan.exprs):
        reason = _attribute_fault(plan, row) or _Row(plan, row).fault()
        if row.attrs.get("phase", "") not in phases:
            reason = "is of a phase that there is not"
        if reason:
            yield f"exprs[{i}], a `{row.op}`, {reason}"


def _attribute_fault(plan: Plan, row: ExprRow) -> str:
    over = row.attrs.get("over", ())
    if not isinstance(over, tuple) or any(dim not in plan.dims for dim in over):
        return "runs over dims that are not there"
    for key, value in row.attrs.items():
        known = {**dict.fromkeys(TEXTS, str), **dict.fromkeys(COUNTS, int), **dict.fromkeys(FLAGS, bool)}.get(key)
        if known and (type(value) is not known or known is int and value < 0):
            return f"has the odd `{key}` {value!r}"[:120]
    temperature, share = row.attrs.get("temperature"), row.attrs.get("top_p")
    if temperature is not None and not (_is_number(temperature) and 0 <= temperature < math.inf):
        return "has no temperature from 0 up"
    if share is not None and not (_is_number(share) and 0 < share <= 1):
        return "has no `top_p` in (0, 1]"
    return ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


class _Row:
    """One row with the rows of its arguments."""

    def __init__(self, plan: Plan, row: ExprRow) -> None:
        self.plan, self.row = plan, row
        self.args = tuple(plan.exprs[i] for i in row.args)
        self.over = row.attrs.get("over", ())

    def fault(self) -> str:
        """"" if it fits."""
        primitive = PRIMITIVES[self.row.op]
        least, most = _arity(self.row.op)
        if not least <= len(self.args) <= most:
            return f"has {len(self.args)} arguments"
        check = {"elementwise": self._elementwise, "reduction": self._reduction, "ragged": self._ragged}.get(
            primitive.kind, getattr(self, f"_{self.row.op}", self._leaf))
        return check() or self._gradient_fault()

    def _is(self, elem: str, dims: Optional[set[str]] = None) -> str:
        """What is wrong with the stated type, if anything; without `dims` any will do."""
        if self.row.elem != elem:
            return f"gives {elem}, not {self.row.elem}"
        stated = self.row.dims
        if len(set(stated)) != len(stated) or dims is not None and set(stated) != dims:
            return f"has not the dims [{', '.join(stated)}]"
        return ""

    def _gradient_fault(self) -> str:
        """A call of a model that is trained at these weights begins a gradient; arguments pass it on."""
        there = {model for arg in self.args for model in arg.grad} if PRIMITIVES[self.row.op].differentiable else set()
        if self.row.op == "call":
            there = {self.row.attrs["model"]} & self._trained(self.row.attrs.get("phase", ""))
        return "" if set(self.row.grad) == there else "has not the gradients of its arguments"

    def _trained(self, phase: str) -> set[str]:
        """The models that the update of a phase trains."""
        loops = (s for s in self.plan.steps if s.op == "update" and names.update(s.index) == phase)
        return {step.model for loop in loops for step in loop.body if step.op == "train"}

    # ---- kinds

    def _elementwise(self) -> str:
        op, elems = self.row.op, [arg.elem for arg in self.args]
        dims = set().union(*(arg.dims for arg in self.args))
        if op == "where":
            right = elems[0] == "bool" and (elems[1] == elems[2] or set(elems[1:]) == {"f32", "bool"})
            right = right and self.row.elem in elems[1:]
            return self._is(self.row.elem, dims) if right else "chooses between values of two types"
        if op in ("eq", "ne"):
            right = elems[0] == elems[1] or set(elems) == {"f32", "bool"}
            return self._is("bool", dims) if right else "compares values of two types"
        if op == "stop":
            return self._is(elems[0], dims)
        wanted = ("bool",) if op in LOGICAL else ("f32", "bool")
        if any(elem not in wanted for elem in elems):
            return f"takes {' or '.join(wanted)}"
        return self._is("bool" if op in (*LOGICAL, *COMPARISONS) else "f32", dims)

    def _reduction(self) -> str:
        op, value, *others = self.row.op, *self.args
        over, there = set(self.over), set().union(*(arg.dims for arg in self.args))
        if not over or len(over) != len(self.over) or not over <= there:
            return "runs over dims that its argument does not have"
        if value.elem not in (("bool",) if op in ("any", "all") else ("f32", "bool")):
            return "reduces values of another type"
        if any(arg.elem not in ("f32", "bool") for arg in others):
            return "has conditions of another type"
        return self._is("bool" if op in ("any", "all") else "f32", there if op == "rank" else there - over)

    def _ragged(self) -> str:
        if len(self.over) != 1 or not self._dim(self.over[0]).ragged:
            return "does not run along a ragged dim"
        ragged, value = self.over[0], self.args[0]
        if self.row.op == "length":
            right = value.elem == "tokens" and ragged in value.dims
            return self._is("f32", set(value.dims) - {ragged}) if right else "measures no response"
        if any(arg.elem not in ("f32", "bool") for arg in self.args):
            return "takes f32 or bool"
        dims = set().union(*(arg.dims for arg in self.args))
        if (ragged in value.dims) == (self.row.op == "at_end"):
            return f"does not run along `{ragged}`"
        lead = set(self._dim(ragged).lead) if self.row.op == "at_end" else set()
        return self._is("f32", dims | lead | {ragged})

    # ---- models and responses

    def _call(self) -> str:
        response, spec = self.args[0], self.plan.models.get(self.row.attrs["model"])
        found = [o for o in OPERATIONS if spec and o.role == spec.role and o.name == self.row.attrs["operation"]]
        if response.elem != "tokens" or not found:
            return "is no operation of its model on a response"
        return self._is("f32", set(response.dims) if found[0].per == "token" else self._samples(response))

    def _generate(self) -> str:
        spec = self.plan.models.get(self.row.attrs["model"])
        if spec is None or spec.role != "policy" or self.args[0].elem not in ("text", "tokens"):
            return "is not of a policy and prompts"
        return self._is("tokens") or self._response_fault()

    def _reply(self) -> str:
        if [arg.elem for arg in self.args] != ["text", "text"]:
            return "is not of prompts and texts"
        return self._is("tokens") or self._response_fault()

    def _response_fault(self) -> str:
        dims, ragged = self.row.dims, [d for d in self.row.dims if self._dim(d).ragged]
        if len(ragged) != 1 or dims[-1] != ragged[0] or set(self._dim(ragged[0]).lead) != set(dims[:-1]):
            return "is no response: its dims are not those of its tokens"
        if self._dim(ragged[0]).response != self.row.attrs["name"]:
            return "is not the response that its tokens' dim is of"
        return "" if set(self.args[0].dims) <= set(self.row.dims) else "lacks a dim of its prompts"

    def _field(self) -> str:
        response, kind = self.args[0], FIELD_TYPES.get(self.row.attrs["field"])
        if response.elem != "tokens" or kind is None:
            return "is of no response"
        return self._is(kind, set(response.dims) if kind == "f32" else self._samples(response))

    def _samples(self, response: ExprRow) -> set[str]:
        return {d for d in response.dims if not self._dim(d).ragged}

    # ---- leaves

    def _leaf(self) -> str:
        return ""

    def _const(self) -> str:
        value = self.row.attrs["value"]
        elem = {bool: "bool", int: "f32", float: "f32", str: "text"}.get(type(value))
        if elem is None or elem == "f32" and not abs(value) < math.inf:
            return "has no value"
        return self._is(elem, set())

    def _data(self) -> str:
        columns = (c for source in self.plan.data for c in source.columns)
        column = next((c for c in columns if c.name == self.row.attrs["column"]), None)
        if column is None or (column.elem, tuple(column.dims)) != (self.row.elem, self.row.dims):
            return "is no column of the data"
        return "" if self.row.elem in ELEMENTS else "has no sound type"

    def _state(self) -> str:
        if self.row.attrs["name"] not in self.plan.states:
            return "is no state of the plan"
        return "" if not self.row.dims and self.row.elem in ("f32", "bool") else "is no scalar"

    _next_state = _state

    def _pyop(self) -> str:
        op = self.plan.ops.get(self.row.attrs["name"])
        if op is None:
            return "is no Python op of the plan"
        return self._is(op.result if op.result in ELEMENTS else self.row.elem)  # of a batch, a list of what the op says

    def _dim(self, name: str) -> DimSpec:
        return self.plan.dims[name]


def _arity(op: str) -> tuple[float, float]:
    """The least and most arguments, as the primitive's signature has them; what a leaf names are attributes."""
    primitive = PRIMITIVES[op]
    if primitive.kind == "leaf":
        return 0, 0
    if op == "pyop":
        return 0, math.inf
    words = re.sub(r"\[[^]]*\]", "", primitive.signature.split("->")[0]).split(",")
    if any(word.strip() == "..." for word in words):
        return len(words) - 1, math.inf
    return sum("?" not in word for word in words), len(words)
