"""A few thousand mutated programs; `python -m tests.fuzz --count 100000` runs as many as wanted."""

import pytest

from tests import fuzz

SEED, HERE, PROCESSES = 2026, 2000, 40


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """What hangs is seen; two seconds are measured on a quiet machine by `python -m tests.fuzz`."""
    monkeypatch.setattr(fuzz, "LIMIT_S", 30.0)


def told(found):
    return "\n".join(f"{one.number}: {one.reason}\n{one.printed[-500:]}" for one in found)


def test_mutated_programs_in_process():
    found = list(fuzz.campaign(SEED, range(HERE)))
    assert not found, told(found)


def test_mutated_programs_as_processes():
    found = list(fuzz.campaign(SEED, range(HERE, HERE + PROCESSES), fuzz.as_process))
    assert not found, told(found)


@pytest.mark.parametrize("unit", [
    "(", "[", "x = 1\n", "\n", "    ", '"', "#", "1 + ", "f(x, ", "-", "dim b = 4\n", "\0", "a"])
def test_a_megabyte_of_one_thing(unit):
    raw = ("rollout:\n    x = " + unit * (fuzz.LARGE // len(unit))).encode()
    found = list(fuzz.in_process(0, raw))
    assert not found, told(found)


def test_what_is_too_large_is_said_at_once():
    code, printed = fuzz.run_here(b"dim b = 4\n" * 20_000, "check", "-")
    assert code == 1 and printed.startswith("error[E0035]: the program is too large\n  ")
    assert printed.endswith("1 program: 1 error\n")


def test_a_number_is_always_the_same_program():
    assert [fuzz.mutated(3, i) for i in range(50)] == [fuzz.mutated(3, i) for i in range(50)]
    assert len({fuzz.mutated(3, i) for i in range(50)}) > 45


def test_faults_are_seen(monkeypatch):
    """An exception, a hang and a wrong exit code are findings."""
    def endless(*_):
        while True:
            pass

    monkeypatch.setattr(fuzz, "LIMIT_S", 0.05)
    failing = ((lambda *_: 1 / 0, "exit code 70"), (lambda *_: exit(5), "exit code 5"))
    for broken, reason in (*failing, (endless, "more than 0.05 s")):
        monkeypatch.setattr("rlhf_dsl.commands.check.diagnose", broken)
        assert [one.reason for one in fuzz.in_process(0, b"dim b = 4\n")] == [f"check: {reason}"]
