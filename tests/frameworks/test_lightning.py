"""The callback in the real Trainer of Lightning, in jobs of two racks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.jobs import ends, launch

pytestmark = pytest.mark.timeout(900)  # several jobs, each of which imports a framework
pytest.importorskip("lightning")
SCRIPT, FABRIC = "lightning_train.py", "fabric_train.py"


def test_fit_resumed_from_a_checkpoint_ends_with_the_weights_of_one_run(tmp_path: Path) -> None:
    """With a schedule, accumulation, clipping, validation, and tokens as weights. The checkpoint is
    of the end of an epoch: within one Lightning begins the data anew."""
    whole = ends(SCRIPT, "--callback", "--folder", tmp_path)
    assert whole[0]["global_step"] == whole[0]["step"] == 24
    assert whole[0]["tokens"] == 24 * 2 * 16
    saved = whole[0]["saved"]
    assert "step=8.ckpt" in saved
    again = ends(
        SCRIPT, "--callback", "--folder", tmp_path, "--resume", "checkpoints/step=8.ckpt"
    )  # fmt: skip
    for key in ("step", "tokens", "digest", "weights", "loss", "rate"):
        assert again[0][key] == whole[0][key], key


def test_fit_of_two_ranks_in_mixed_precision_ends_with_equal_weights(tmp_path: Path) -> None:
    mixed = ["--callback", "--folder", tmp_path, "--ranks", 2, "--precision", "bf16-mixed"]
    whole = ends(SCRIPT, *mixed, ranks=2)
    assert whole[0]["step"] == 24
    assert whole[0]["tokens"] == 24 * 2 * 16
    assert "step=8.ckpt" in whole[0]["saved"]
    again = ends(SCRIPT, *mixed, "--resume", "checkpoints/step=8.ckpt", ranks=2)
    for key in ("step", "tokens", "digest", "weights", "loss"):
        assert again[0][key] == whole[0][key], key


def test_loop_with_fabric_resumed_ends_with_the_weights_of_one_run(tmp_path: Path) -> None:
    """Fabric has no callback of mend: its loop takes a session."""
    options = ["--folder", tmp_path, "--ranks", 2, "--precision", "bf16-mixed"]
    whole = ends(FABRIC, *options, ranks=2)
    assert whole[0]["step"] == 24
    assert whole[0]["tokens"] == 24 * 16
    again = ends(FABRIC, *options, "--resume", ranks=2)
    for key in ("step", "tokens", "digest", "weights", "loss"):
        assert again[0][key] == whole[0][key], key


def test_fit_without_a_callback_joins_by_the_entry_point(tmp_path: Path) -> None:
    end = ends(SCRIPT, "--folder", tmp_path)
    assert end[0]["step"] == 24
    done = launch(SCRIPT, "--folder", tmp_path, MEND_LIGHTNING="0")
    assert done.returncode != 0, "the script asks for the callback's status"
    assert "StopIteration" in done.stdout + done.stderr
