"""E00: reading and parsing a program. The first ten are about the file or the command line (exit code 2)."""

from rlhf_dsl.codes.code import Code
from rlhf_dsl.codes.example import rolled, updated

CODES: tuple[Code, ...] = (
    Code(
        "E0001", "there is no file `{path}`",
        "A path on the command line, or in the program, leads nowhere. Relative paths on the command line start at the "
        "working directory.",
        status=2,
    ),
    Code(
        "E0002", "cannot read `{path}`: {reason}",
        "The file is there, but the system refuses to read or write it: a folder, or a file without the permission.",
        "give the path of a file that you may read, and for `rlflowc fmt` may write", status=2,
    ),
    Code(
        "E0003", "`{path}` is not text in UTF-8",
        "A program is a text file in UTF-8. The place given is that of the first byte that is not.",
        "convert it: `iconv -f latin1 -t utf-8`", status=2,
    ),
    Code(
        "E0004", "bad value `{given}` for {option}",
        "An option of the command line was given something that it does not take.",
        "it has the form {form}", status=2,
    ),
    Code(
        "E0005", "cannot read the command line: {reason}",
        "A command, option or value that `rlflowc` does not have. `rlflowc COMMAND --help` shows what a command takes.",
        status=2,
    ),
    Code(
        "E0010", "unexpected {found}",
        "The line reads well up to the marked place, but what stands there cannot follow. The help shows the form of "
        "the statement that the line begins with, or what could have stood there.",
        "expected {expected}", "param eps 0.2", "param eps = 0.2",
    ),
    Code(
        "E0011", "`:` is missing after `{head}`",
        "Sections, functions and `every` end their first line in a colon.",
        "write `:` at the marked place", "run\n    steps = 1", "run:\n    steps = 1",
    ),
    Code(
        "E0012", "`^` is not an operator",
        "A power is written as in Python.", "write `**` for a power: `x ** 2`",
        "param a = 2 ^ 3", "param a = 2 ** 3",
    ),
    Code(
        "E0013", "`{bracket}` is never closed",
        "A bracket is open to the end of the file. Newlines inside brackets are ignored, so that everything after it "
        "would belong to one statement.",
        "write `{close}` where the expression ends", "param a = (1 + 2", "param a = (1 + 2)",
    ),
    Code(
        "E0014", "`{bracket}` closes nothing",
        "There is a closing bracket more than there are opening ones.", "take it out, or open one before it",
        "param a = 1 + 2)", "param a = 1 + 2",
    ),
    Code(
        "E0015", "`=` inside an expression",
        "`=` binds a name at the start of a line, and names an argument in a call. Equality is `==`.",
        "write `==` to compare", rolled("keep if r = 1"), rolled("keep if r == 1"),
    ),
    Code(
        "E0016", "a tab",
        "Programs are indented and spaced with spaces, so that they look the same everywhere.",
        "write spaces instead; four for a level of indentation", "run:\n\tsteps = 1", "run:\n    steps = 1",
    ),
    Code(
        "E0017", "nothing stands in `{head}:`",
        "The lines of a section or function stand below its first line and deeper than it.",
        "indent its lines by four spaces, or take it out", "run:\nsteps = 1", "run:\n    steps = 1",
    ),
    Code(
        "E0018", "this indentation {what}",
        "All lines of a section stand at the same column; declarations and section heads stand at column 1.",
        "line it up with the statements that it belongs to",
        "run:\n    steps = 1\n      seed = 1", "run:\n    steps = 1\n    seed = 1",
    ),
    Code(
        "E0019", "`{word}` is Python, not rlflow",
        "A program is a set of equations over whole batches: it has no statements that jump, loop or change a name. "
        "What cannot be written so is a Python op: `from pkg.mod import f`.",
        "{instead}", rolled("a = 1 if r > 0 else 2"), rolled("a = where(r > 0, 1, 2)"),
    ),
    Code(
        "E0020", "the string is never closed",
        "A string ends on the line it begins on; a docstring in three quotes may go on.",
        "close it with `{quote}`", 'param base = "builtin:tiny', 'param base = "builtin:tiny"',
    ),
    Code(
        "E0021", "`{char}` has no meaning here",
        "The character belongs to no token of the language. Names are made of a-z, A-Z, 0-9 and `_`.",
        "take it out; names are made of a-z, A-Z, 0-9 and `_`", "param β = 1", "param beta = 1",
    ),
    Code(
        "E0022", "nested too deeply",
        "An expression may nest sixty brackets or a hundred operators deep; deeper ones are hard to read, and most "
        "often a slip.",
        "give a part of it a name of its own",
    ),
    Code(
        "E0023", "`{text}` is not a number",
        "Numbers are written `64`, `0.2` or `1e-4`.",
        "write it like `64`, `0.2` or `1e-4`; names begin with a letter",
        "param a = 1e", "param a = 1e0",
    ),
    Code(
        "E0024", "`{word}` begins no {what}",
        "A line at column 1 is a declaration or the head of a section; a line in a section is one of its statements.",
        "", "parm a = 1", "param a = 1",
    ),
    Code(
        "E0025", "{what} cannot stand {where}",
        "Each section takes its own statements; declarations stand outside of all sections.",
        "{allowed}", rolled("train actor to maximize mean(r)"),
        updated("train actor to maximize mean(actor.logprobs(y) * r)"),
    ),
    Code(
        "E0026", "a positional argument after a named one",
        "Arguments without a name come first.", "move it before `{keyword}=`",
        rolled("a = mean(where=r > 0, r)"), rolled("a = mean(r, where=r > 0)"),
    ),
    Code(
        "E0027", "`{keyword}` is given twice",
        "An argument or setting has one value.", "take one of them out",
        rolled("a = std(r, unbiased=true, unbiased=false)"), rolled("a = std(r, unbiased=false)"),
    ),
    Code(
        "E0028", "`{name}` is a word of the language",
        "`and`, `or`, `not`, `true` and `false` cannot be names.", "choose another name", "dim not = 3", "dim n = 3",
    ),
    Code(
        "E0029", "only a name can be bound",
        "On the left of `=` stands a name, with the dims of its value if you like: `y[b, t] = ...`.",
        "bind a name of its own", rolled("y.text = r"), rolled("text = r"),
    ),
    Code(
        "E0030", "an expression alone does nothing",
        "A statement binds a value to a name, records a metric, keeps rows or trains a model.",
        "bind it: `name = ...`", rolled("mean(r)"), rolled("a = mean(r)"),
    ),
    Code(
        "E0031", "values are not indexed",
        "Dims in brackets follow an operation, `sum[t](x)`, and stand on the left of `=`; everything else acts on "
        "whole batches, broadcasting by the names of dims.",
        "reduce with an operation such as `sum[t](x)`, or write the call's arguments after the brackets",
        rolled("a = r[b]"), rolled("a = sum[b, g](r)"),
    ),
    Code(
        "E0032", "`{bracket}` closes the wrong bracket",
        "Brackets close in the order in which they were opened, each with its own kind.", "expected `{close}`",
        "param a = (1 + 2]", "param a = (1 + 2)",
    ),
    Code(
        "E0033", "function `{name}` returns nothing",
        "The last line of a function is its `return`.", "end it with `return ...`",
        "fn f(x):\n    y = x", "fn f(x):\n    y = x\n    return y",
    ),
    Code(
        "E0034", "the statements of `{head}:` stand on lines of their own",
        "The first line of a section ends in its colon.", "start a new line after `:`, four spaces deeper",
        "run: steps = 1", "run:\n    steps = 1",
    ),
    Code(
        "E0035", "the program is too large",
        "A program is an algorithm: a page or two of equations. What has more than 60,000 words, signs and lines is "
        "data, or was made by mistake.",
        "name the file of a program; data belongs into a file that a `data` declaration names",
    ),
)
