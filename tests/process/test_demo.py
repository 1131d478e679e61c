"""What `mend demo` promises of its tapes: a job of the demo's, and both levels of its replay."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mend.tools import demo
from mend.tools.demo_report import FREE
from tests.process.racks import Nursery, run_mend, run_module

DELAY_MS = 40.0


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_the_demos_tape_replays(nursery: Nursery, tmp_path: Path) -> None:
    """The free run, where who is in a merge, and when it is applied, is as it happens to be."""
    recipe = demo.recipes(quick=True, steps=40, out=tmp_path)[FREE]
    recipe = replace(recipe, delay_ms=DELAY_MS, eval_batches=2)
    Path(recipe.out).mkdir()
    demo.run(recipe, 1, Console(file=StringIO()))
    status, said = run_mend(nursery, "replay", recipe.out)
    assert status == 0, said
    assert len(re.findall(r"tape-rack\d+-rank0\.mend: equal: .* [1-9]\d* rounds", said)) == 3
    script = ["-m", "mend.tools.demo_train", json.dumps(asdict(recipe))]
    words = ("replay", recipe.out, "--", *script)
    status, said = run_module(nursery.python, "mend_lab", *words, CUDA_VISIBLE_DEVICES="")
    assert status == 0, said
    assert re.search(
        r"replayed (\d+) rounds of 2 racks: every digest equals that on the tape", said
    )
