"""What all tests under mpiexec start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.judging import shipped_programs


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Path:
    """The shipped programs with their data and models; nothing writes there."""
    return shipped_programs(tmp_path_factory.mktemp("shipped") / "programs")
