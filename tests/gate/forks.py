"""Workers of pytest-xdist, and their nurseries, as forks of a process that has imported what all of
them need. Each of them would take seconds of CPU to import torch, mend and all tests."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.process.racks import Nursery

COMMAND = "GATE_NURSERY"
"""What starts a nursery, for the workers."""


class Forks:
    """A pytest plugin of the process that hands out the tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mend-tests-"))
        first, second = self._folder / "torch", self._folder / "tests"
        for folder in (first, second):
            folder.mkdir()
        of_torch, of_tests = Nursery(first), Nursery(second, tests=config.args)  # load at once
        self._nurseries = [of_tests, of_torch]
        python = shlex.join(of_tests.command(sys.executable))
        config.option.tx = [f"popen//python={python}"] * len(config.option.tx)
        os.environ[COMMAND] = shlex.join(of_torch.command(sys.executable))

    def pytest_unconfigure(self) -> None:
        for nursery in self._nurseries:
            nursery.close()
        shutil.rmtree(self._folder)


def wanted(config: pytest.Config) -> bool:
    """Whether several workers of this machine run the tests. Forking as nursery.py does it needs
    Linux."""
    tx = getattr(config.option, "tx", None) or []
    return len(tx) > 1 and set(tx) == {"popen"} and sys.platform == "linux"


def nursery(folder: Path) -> Nursery:
    """Of a worker, or of tests that one process runs."""
    return Nursery(folder, shlex.split(os.environ.get(COMMAND, shlex.quote(sys.executable))))
