"""`mend bench` in a checkout and in an installed package; the commands behind it have tests in
tests/unit/benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mend.errors import ConfigError
from mend.tools import bench
from mend.tools.bench import source_tree

BENCH = """
import json, os
def bench_app(args, prog_name):
    print(json.dumps([prog_name, args, os.environ["PYTHONPATH"].split(os.pathsep)[0]]))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "_commands.py").write_text(BENCH)
    return tmp_path


def test_outside_of_a_checkout_the_remedy_is_said(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source_tree() == Path(__file__).parents[3]
    monkeypatch.setattr(bench, "__file__", "/nowhere/src/mend/tools/bench.py")
    monkeypatch.chdir(checkout)
    assert source_tree() == checkout
    monkeypatch.chdir(checkout.parent)
    with pytest.raises(ConfigError, match="Clone the repository"):
        source_tree()


def test_an_installed_mend_runs_the_benchmarks_of_the_checkout_that_the_shell_is_in(
    checkout: Path,
) -> None:
    """A wheel is the package with nothing beside it."""
    package = Path(bench.__file__).parents[1]
    shutil.copytree(package, checkout / "site" / "mend", ignore=shutil.ignore_patterns("*.pyc"))
    words = ["run", "--quick", "merge", "--", "--help"]
    told = subprocess.run(
        [sys.executable, "-m", "mend.tools", "bench", *words], cwd=checkout, check=True,
        env={**os.environ, "PYTHONPATH": str(checkout / "site")}, capture_output=True,
    )  # fmt: skip
    assert json.loads(told.stdout) == ["mend bench", words, str(checkout)]
