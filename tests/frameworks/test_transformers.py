"""The callback in the real Trainer of transformers, in jobs of two racks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.frameworks.jobs import LIMIT_S, ends, launch

pytestmark = pytest.mark.timeout(3 * LIMIT_S)  # several jobs, each of which imports a framework
pytest.importorskip("transformers")
SCRIPT = "hf_train.py"


def test_trainer_killed_and_resumed_ends_with_the_weights_of_one_run(tmp_path: Path) -> None:
    """With evaluation, saving, a schedule, accumulation, clipping, and tokens as weights. Only the
    tokens before the kill that no checkpoint holds are trained again."""
    more = json.dumps({"gradient_accumulation_steps": 2})
    whole = ends(SCRIPT, "--folder", tmp_path / "whole", "--more", more)
    assert whole[0]["global_step"] == whole[0]["step"] == 24
    assert whole[0]["tokens"] == 24 * 2 * 8 * 16
    folder = tmp_path / "killed"
    killed = launch(SCRIPT, "--folder", folder, "--more", more, "--die-in", 20)
    assert killed.returncode != 0
    saved = sorted(path.name for path in (folder / "rack-1").iterdir())
    assert saved == ["checkpoint-16", "checkpoint-8"]
    assert ends(SCRIPT, "--folder", folder, "--more", more, "--resume") == whole


def test_trainer_of_two_ranks_in_mixed_precision_ends_with_equal_weights(tmp_path: Path) -> None:
    more = json.dumps({"bf16": True, "ddp_backend": "gloo"})
    killed = launch(SCRIPT, "--folder", tmp_path, "--more", more, "--die-in", 20, ranks=2)
    assert killed.returncode != 0
    end = ends(SCRIPT, "--folder", tmp_path, "--more", more, "--resume", ranks=2)
    assert end[0]["step"] == 24


def test_trainer_that_loads_its_best_model_has_merged_before(tmp_path: Path) -> None:
    """And it says that the racks may end with different models, and what to do."""
    more = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    done = launch(SCRIPT, "--folder", tmp_path, "--more", json.dumps(more))
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "the racks may end with different models. Leave it False" in said
    assert done.stdout.count('"outcome": "merged"') == 2


def test_whole_flow_of_the_trainer_works_twice_in_a_row(tmp_path: Path) -> None:
    """Evaluate, save, be killed, resume, load the best model, evaluate after train. Then train the
    result on, in a job of its own, which is killed and resumed as well."""
    more = {"save_total_limit": 2, "metric_for_best_model": "eval_loss"}
    best, losses = json.dumps({**more, "load_best_model_at_end": True}), []
    for steps, resume in ((24, []), (48, ["--resume"])):
        flow = ["--folder", tmp_path, "--steps", steps]
        killed = launch(SCRIPT, *flow, "--more", json.dumps(more), "--die-in", steps - 4, *resume)
        assert killed.returncode != 0
        assert not list(tmp_path.glob(f"rack-?/checkpoint-{steps}"))
        first, _ = ends(SCRIPT, *flow, "--more", best, "--resume")
        assert (first["global_step"], first["step"], first["detail"]) == (steps, 24, "")
        losses.append(first["loss"])
    assert losses[1] < losses[0]


def test_trainer_with_save_strategy_best_is_refused(tmp_path: Path) -> None:
    more = {"save_strategy": "best", "metric_for_best_model": "eval_loss"}
    done = launch(SCRIPT, "--folder", tmp_path, "--more", json.dumps(more))
    assert done.returncode != 0
    assert "each rack would save at steps of its own" in done.stdout + done.stderr
    alone = ["--no-checkpoints", "--folder", tmp_path, "--more", json.dumps(more)]
    assert len(ends(SCRIPT, *alone)) == 2


def test_trainer_that_an_exception_ended_trains_again(tmp_path: Path) -> None:
    import mend
    from mend.integrations.transformers import MendCallback
    from tests.frameworks.hf_train import small_trainer

    callback = MendCallback(mend.MendConfig(rack=0, racks=1))
    trainer, fault = small_trainer(tmp_path, callback)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    trainer.remove_callback(fault)
    trainer.train()
    assert callback.status is not None
    assert callback.status.step == 8
