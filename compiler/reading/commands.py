"""The commands that read plans: `explain`, `diff`, `sbatch`."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable

from compiler.commands import cluster_of, compile_file, is_plan, write
from compiler.commands import explain_command as explain_plan_command
from compiler.plan import Plan
from compiler.proof.verify import load_plan
from compiler.reading.analyze import analysis_json, analysis_text, analyze
from compiler.reading.diff import diff_json, diff_text, differences
from compiler.reading.why import why, why_json, why_text
from rlhf_dsl.diagnostics import fault
from rlhf_dsl.terminal import put_json, say

EXIT_DIFFERENT = 1


def explain_command(args: Namespace) -> int:
    """The whole plan, what `--why` asks of it, or what `--analyze` finds in a run."""
    if args.analyze is not None:
        found = analyze(Path(args.analyze), cluster_of(args))
        return _shown(args, lambda: analysis_json(found), lambda: analysis_text(found))
    if args.program is None:
        raise fault("E0005", reason="the following arguments are required: PROGRAM",
                    help="`rlflowc explain --help` shows what there is")
    if args.format == "html":
        if args.json or args.why is not None:
            raise fault("E0005", reason="--format html is a page of its own", help="leave out `--json` and `--why`")
        return _report(args)
    if args.output:
        raise fault("E0005", reason="-o is for --format html", help="give both, or neither")
    if args.why is None:
        return explain_plan_command(args)
    answer = why(plan_of(args, args.program), cluster_of(args), args.why)
    return _shown(args, lambda: why_json(answer), lambda: why_text(answer))


def _report(args: Namespace) -> int:
    """The page of a plan; jinja2 is read for it alone."""
    from compiler.reading.report.page import report

    plan = plan_of(args, args.program)
    write(report(plan, cluster_of(args), program_lines(plan)), args.output)
    return 0


def program_lines(plan: Plan) -> list[str]:
    """The program that a plan was made of, if it is where it was and as it was."""
    try:
        text = Path(plan.program.path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return text.splitlines() if hashlib.sha256(text.encode()).hexdigest() == plan.program.digest else []


def _shown(args: Namespace, json: Callable[[], Any], text: Callable[[], str]) -> int:
    if args.json:
        put_json(json())
    else:
        print(text(), end="")
    return 0


def plan_of(args: Namespace, path: str) -> Plan:
    """The plan in a file, or that of a program on `--ranks` of `--cluster`."""
    if not is_plan(path):
        return compile_file(Namespace(**{**vars(args), "program": path}), args.ranks)[0]
    if args.set:
        raise fault("R0156", option="-s")
    return load_plan(Path(path))


def diff_command(args: Namespace) -> int:
    """Prints how the second plan differs from the first. Returns 0 if both do the same, else 1."""
    before, after = (plan_of(args, path) for path in (args.before, args.after))
    cluster = cluster_of(args)
    if cluster.digest not in (before.cluster, after.cluster):
        name = "this machine" if cluster.is_local else cluster.name
        say(f"no estimates: neither plan was made for {name}; `--cluster` names the one to estimate for")
    changes = differences(before, after, cluster)
    _shown(args, lambda: diff_json(changes), lambda: diff_text(changes))
    return EXIT_DIFFERENT if changes else 0


def sbatch_command(args: Namespace) -> int:
    """Writes the job script of a plan file; jinja2 is read for it alone."""
    from compiler.reading.sbatch import Job, job_script

    path = Path(args.plan)
    job = Job(args.time or "", args.partition or "", args.account or "", args.gpus)
    write(job_script(load_plan(path), path, cluster_of(args), job), args.output)
    return 0
