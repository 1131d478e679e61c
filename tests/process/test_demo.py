"""What `mend demo` promises of its tapes: a job of the demo's, and both levels of its replay."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mend.tools import demo
from mend.tools.demo_report import FREE
from tests.process.racks import LIMIT_S, Nursery, environment

DELAY_MS = 40.0


def run(python: str, module: str, *arguments: object) -> str:
    """What it said; it has to succeed."""
    done = subprocess.run(
        [python, "-m", module, *map(str, arguments)],
        env=environment(COLUMNS="200", CUDA_VISIBLE_DEVICES=""), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_the_demos_tape_replays(nursery: Nursery, tmp_path: Path) -> None:
    """The free run, where who is in a merge, and when it is applied, is as it happens to be."""
    recipe = demo.recipes(quick=True, steps=40, out=tmp_path)[FREE]
    recipe = replace(recipe, delay_ms=DELAY_MS, eval_batches=2)
    Path(recipe.out).mkdir()
    demo.run(recipe, 1, Console(file=StringIO()))
    said = run(nursery.python, "mend.tools", "replay", recipe.out)
    assert len(re.findall(r"tape-rack\d+-rank0\.mend: equal: .* [1-9]\d* rounds", said)) == 3
    script = ["-m", "mend.tools.demo_train", json.dumps(asdict(recipe))]
    said = run(nursery.python, "mend_lab", "replay", recipe.out, "--", *script)
    assert re.search(
        r"replayed (\d+) rounds of 2 racks: every digest equals that on the tape", said
    )
