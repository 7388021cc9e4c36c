"""E06: Python ops. Their signatures are read from source; nothing of it is run before the program runs."""

from rlhf_dsl.codes.code import Code

CODES: tuple[Code, ...] = (
    Code(
        "E0601", "there is no module `{module}`",
        "A module is looked for beside the program, as `pkg/mod.py`, then among those installed. It is not imported "
        "before the run.",
        "looked in `{folder}` and in the installed packages", "from rewards.nowhere import f",
    ),
    Code(
        "E0602", "`{module}` has no function `{name}`",
        "The function is defined at the top level of the module's file, where its signature can be read.",
        "it would stand in `{file}`",
    ),
    Code(
        "E0603", "`{name}` is not marked `@op`",
        "A program calls functions that say they are meant for it: `from rlhf_dsl import op`, and `@op` above the "
        "function. It cannot be `async`.",
        "write `@op` above line {line} of `{file}`",
    ),
    Code(
        "E0604", "`{name}` has no annotation for `{arg}`",
        "The signature of a Python op says what it takes and gives, for each argument and for the result. It takes a "
        "fixed number of arguments.",
        "annotate it in line {line} of `{file}`, as in `def f(response: str, answer: str) -> float`",
    ),
    Code(
        "E0605", "`{name}` has the annotation `{annotation}` for `{arg}`, which programs do not know",
        "An op takes and gives `str`, `float`, `int`, `bool` or `list[float]`, one for each own token; with "
        "`@op(batched=True)` it sees whole groups: `Text[\"b g\"]`, `F32[\"b g\"]`, `Bool[\"b g\"]`.",
        "change line {line} of `{file}`",
    ),
    Code(
        "E0606", "the option `{option}` of `@op` at `{name}` cannot be read",
        "`@op` takes `batched=True`, `timeout=SECONDS` and `on_error=VALUE`, written as literals.",
        "change line {line} of `{file}`",
    ),
    Code(
        "E0607", "cannot read the module `{module}`: {reason}",
        "The file of the module cannot be read as Python.",
        "see {place}",
    ),
    Code(
        "E0608", "`{name}` takes {expected} arguments, {given} given",
        "A Python op is called with its arguments by position; the last may be left out where they have defaults.",
        "it is `{name}({takes})`",
    ),
    Code(
        "E0609", "`{arg}` of `{name}` is `{annotation}`, found `{found}`",
        "A `str` takes text, a `float` a number of each row, a `list[float]` the numbers of a response's own tokens.",
        "pass a value of that kind, or change the annotation of `{arg}` where `{name}` is defined",
    ),
    Code(
        "E0610", "the dims of `{name}` do not fit: {reason}",
        "An op is mapped over the leading dims of its arguments, by name. One that is batched sees whole nested lists, "
        "whose dims its signature names; they stand for the arguments' dims of the same names, else in order.",
        "pass arguments that vary over the same rows, or change the annotations of `{name}`",
    ),
)
