"""What a search that takes its time shows, and that it can be interrupted."""

from __future__ import annotations

import gc
import io
import sys

import pytest

from compiler.search import progress
from compiler.search.progress import ShownProgress
from rlhf_dsl.cli import main
from tests.compiling import PROGRAMS

COMMAND = ["explain", str(PROGRAMS / "ppo.rlflow"), "--cluster", str(PROGRAMS / "clusters" / "a100-1x8.toml"),
           "-s", "base=catalog:llama-3.2-1b"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_of_a_long_search(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    assert main(COMMAND) == 0
    assert capsys.readouterr().err.count("searching for a placement") == 1


def test_a_short_search_says_nothing(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 1e9)
    assert main(COMMAND) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ended", [None, ValueError])
def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch, ended):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    shown = ShownProgress()
    with pytest.raises(ended) if ended else shown:
        with shown:
            shown(1, 4, float("inf"))
            shown(2, 4, 12.5)
            if ended:
                raise ended
    assert "searching for a placement" in terminal.getvalue()
    assert shown.bar.finished or not shown.bar.live.is_started


def test_an_interrupted_search_ends_with_130_and_no_traceback(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ShownProgress, "__call__", interrupt)
    assert main(COMMAND) == 130
    told = capsys.readouterr()
    assert told.out == "" and "Traceback" not in told.err and gc.isenabled()
