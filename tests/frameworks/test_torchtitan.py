"""The trainer with torchtitan's debug model, in jobs of two racks of one rank on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.jobs import LIMIT_S, ends, launch

pytestmark = pytest.mark.timeout(3 * LIMIT_S)  # several jobs, each of which imports a framework
pytest.importorskip("torchtitan")
SCRIPT = "titan_train.py"


def test_trainer_killed_and_resumed_ends_with_the_weights_of_one_run(tmp_path: Path) -> None:
    """With clipping, a schedule and checkpoints; each rack reads its own share of the data."""
    whole = ends(SCRIPT, "--folder", tmp_path / "whole")
    assert whole[0]["step"] == whole[0]["titan_step"] == 24
    assert whole[0]["tokens"] == 24 * 2 * 32
    assert [each["share"] for each in whole] == [[0, 2], [1, 2]]
    folder = tmp_path / "killed"
    assert launch(SCRIPT, "--folder", folder, "--die-in", 20).returncode != 0
    assert ends(SCRIPT, "--folder", folder) == whole
