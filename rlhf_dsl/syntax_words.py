"""The words that syntax errors are told from, and told in."""

from __future__ import annotations

SECTIONS = ("rollout", "update", "plan", "eval", "run")
DECLARATIONS = ("dim", "param", "state", "data", "model", "fn", "from")
STATEMENTS = ("metric", "keep", "train", "every")
# Statements by their first word.
FORMS = {
    "dim": "`dim b = 64` or `dim t <= 32`",
    "param": "`param NAME = VALUE`, with a range: `param NAME = VALUE in (0, 1]`",
    "state": "`state NAME = INIT then NEXT`",
    "data": '`data NAME[DIM] = jsonl("FILE", "FIELD")`',
    "model": "`model NAME = ROLE(SOURCE)`, to be trained: `model NAME = ROLE(SOURCE) trained by adamw(lr=1e-4)`",
    "fn": "`fn NAME(x[t], k):`, and below it its bindings and `return VALUE`",
    "from": "`from PACKAGE.MODULE import NAME`",
    "metric": "`metric NAME = VALUE`",
    "keep": "`keep if CONDITION`, or `keep if CONDITION, refill=3`",
    "train": "`train MODEL to maximize VALUE` or `train MODEL to minimize VALUE`",
    "every": "`every 50: save(actor)`",
    "return": "`return VALUE, VALUE`",
}
_REDUCERS = "write a reduction over a dim, such as `sum[t](x)`, or `togo[t]` for a recurrence"
# Words of Python, with the way to say it here.
PYTHON = {
    "if": "choose element by element: `where(condition, a, b)`; to drop rows: `keep if condition`",
    "else": "choose element by element: `where(condition, a, b)`",
    "elif": "choose element by element: `where(condition, a, b)`",
    "for": _REDUCERS,
    "while": _REDUCERS,
    "def": "functions are written `fn NAME(x, y):` with a `return`",
    "lambda": "functions are written `fn NAME(x, y):` with a `return`",
    "class": "there are no classes",
    "import": "Python ops come in by `from PACKAGE.MODULE import NAME`",
    "return": "only a function returns; bind the value to a name",
    "pass": "take the line out",
    "assert": "record what you want to see: `metric NAME = VALUE`",
    "print": "record what you want to see: `metric NAME = VALUE`",
    "with": "what a section binds is a constant of every update; nothing else needs a context",
    "del": "names stay bound",
    "try": "an op's own policy says what happens when it fails: `@op(on_error=0.0)`",
    "is": "compare with `==`",
    "in": "a range follows a param's default only; compare with `==`",
    "None": "leave the argument out",
    "True": "booleans are `true` and `false`",
    "False": "booleans are `true` and `false`",
}
_BOUND_ONCE = "a name is bound once; bind the result to a new name, or keep a `state` from one iteration to the next"
# Two tokens that are one in another language.
GLUED = {
    **dict.fromkeys(("+=", "-=", "*=", "/=", "**="), _BOUND_ONCE), "//": "`/` never truncates",
    "=>": "greater or equal is written `>=`", "=<": "less or equal is written `<=`", "===": "equality is `==`",
    "<>": "not equal is written `!=`", ":=": "bind the name on a line of its own", "->": "functions have no result type",
}
# The grammar's terminals in words; those not here are printed as they are.
TERMINALS = {
    "NAME": "a name", "NUMBER": "a number", "STRING": "a string", "LONG_STRING": "a docstring", "_NL": "the end of the line",
    "OPEN": "`(`", "CLOSE": "`)`", "OPEN_SQUARE": "`[`", "CLOSE_SQUARE": "`]`", "COLON": "`:`", "COMMA": "`,`", "DOT": "`.`",
    "EQUALS": "`=`", "AT_MOST": "`<=`",
}
# What may follow an operand, told as "an operator", and what may begin one, told as "an expression".
OPERATORS = {
    "PLUS", "MINUS", "TIMES", "DIVIDE", "POWER", "AND", "OR", "NOT", "LESSTHAN", "MORETHAN", "AT_MOST",
    "DOT", "OPEN", "OPEN_SQUARE", "EQUALS",
}
OPERANDS = {"NAME", "NUMBER", "STRING", "OPEN"}
