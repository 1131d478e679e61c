"""The trainer with torchtitan's debug model, in jobs of two racks of one rank on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.jobs import LIMIT_S, ends, launch

pytestmark = pytest.mark.timeout(3 * LIMIT_S)  # several jobs, each of which imports a framework
pytest.importorskip("torchtitan")
SCRIPT = "titan_train.py"


@pytest.mark.parametrize(("stages", "schedule", "parts"), [(1, "", 1), (2, "Interleaved1F1B", 2)])
def test_trainer_killed_and_resumed_ends_with_the_weights_of_one_run(
    tmp_path: Path, stages: int, schedule: str, parts: int
) -> None:
    """With clipping, a schedule and checkpoints; each rack reads its own share of the data."""
    pipeline = ("--stages", stages, "--schedule", schedule) if stages > 1 else ()
    whole = ends(SCRIPT, "--folder", tmp_path / "whole", *pipeline, ranks=stages)
    assert whole[0]["step"] == whole[0]["titan_step"] == 24
    assert whole[0]["tokens"] == 24 * 2 * 32
    assert whole[0]["parts"] == parts
    assert [each["share"] for each in whole[::stages]] == [[0, 2], [1, 2]]
    killed = ("--folder", tmp_path / "killed", *pipeline)
    assert launch(SCRIPT, *killed, "--die-in", 20 * stages, ranks=stages).returncode != 0
    assert ends(SCRIPT, *killed, ranks=stages) == whole
