"""A checkpoint that is not what it should be is refused by name, and training is not begun on it.
A job of one rank, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mend
from mend.engine.checkpoint_files import newest_checkpoint
from mend.errors import CheckpointError, UsageError
from tests.process import train
from tests.process.conftest import Configure

STEPS = 13
"""Behind a capture at step 12, so that an offer may be open."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    train.loss_of(model, 0, 0, number).backward()
    optimizer.step()


def script() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = train.build("plain", 0)
    return model, train.optimizer_of(model)


@pytest.fixture
def saved(alone: Configure, tmp_path: Path) -> Path:
    """A complete checkpoint; the job has ended."""
    model, optimizer = script()
    folder = tmp_path / "cuts" / "first"
    with mend.session(model, alone(), optimizer) as runtime:
        for number in range(1, STEPS + 1):
            step(model, optimizer, number)
        found = runtime.checkpoint(folder, lambda path: save(path, model, optimizer))
        assert found == folder
    return folder


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save([model.state_dict(), optimizer.state_dict()], path / "script.pt")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states = torch.load(folder / "rack-0" / "script.pt", weights_only=True)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])


def begin(saved: Path, config: mend.MendConfig, path: Path | None = None) -> mend.Status:
    """Load, resume, leave; the status at the begin."""
    model, optimizer = script()
    load(saved, model, optimizer)
    with mend.session(model, config, optimizer, resume=path or saved) as runtime:
        return runtime.status()


def test_step_tokens_versions_and_what_is_open_come_back(saved: Path, alone: Configure) -> None:
    manifest = json.loads((saved / "rack-0" / "manifest.json").read_text())
    status = begin(saved, alone(), saved.parent)
    assert status.step == status.tokens == STEPS
    assert list(status.versions) == manifest["versions"]
    assert status.ledger.open * 2 == manifest["open_tokens"] > 0


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def cut_short(path: Path, _: int) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path, _: int) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("harm", "name", "place", "said"),
    [
        (flip, "rank-0.safetensors", -1, "rank-0.safetensors is damaged"),
        (flip, "rank-0.safetensors", 0, "rank-0.safetensors is damaged"),
        (cut_short, "rank-0.safetensors", 0, "rank-0.safetensors is damaged"),
        (remove, "rank-0.safetensors", 0, "rank-0.safetensors is missing"),
        (flip, "notes.txt", 0, "notes.txt is damaged"),
        (cut_short, "notes.txt", 0, "notes.txt is damaged"),
        (flip, "manifest.json", 40, "manifest.json is damaged"),
        (cut_short, "manifest.json", 0, "manifest.json is damaged"),
        (remove, "COMPLETE", 0, "no complete checkpoint"),
    ],
)
def test_damage_is_refused_with_the_name_of_the_file(
    alone: Configure, tmp_path: Path, harm: Callable[[Path, int], None], name: str, place: int,
    said: str,
) -> None:  # fmt: skip
    model, optimizer = script()
    folder = tmp_path / "cut"

    def notes(path: Path) -> None:
        (path / "notes.txt").write_text("of the script")

    with mend.session(model, alone(), optimizer) as runtime:
        step(model, optimizer, 1)
        runtime.checkpoint(folder, notes)
        weights = [p.detach().clone() for p in model.parameters()]
    harm(folder / "rack-0" / name, place)
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(value)
    with pytest.raises(CheckpointError, match=said):
        mend.mend_init(model, alone(), optimizer, resume=folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sync_period_steps": 16}, "sync_period_steps was 8, is 16 here"),
        ({"payload_dtype": "bfloat16"}, "codec was float32, is bfloat16 here"),
    ],
)
def test_another_plan_is_refused(
    saved: Path, alone: Configure, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        begin(saved, alone(**changes))


def test_another_model_is_refused(saved: Path, alone: Configure) -> None:
    model = train.build("unbiased", 0)
    with pytest.raises(CheckpointError, match="of another plan"):
        mend.mend_init(model, alone(), train.optimizer_of(model), resume=saved)


def test_a_model_that_was_not_loaded_is_refused(saved: Path, alone: Configure) -> None:
    """Its distance from the anchor would be merged as if it were training."""
    model, optimizer = script()
    with pytest.raises(CheckpointError, match=r"do not hold what .* has of step 13"):
        mend.mend_init(model, alone(), optimizer, resume=saved)


def test_a_folder_without_a_checkpoint_is_refused(alone: Configure, tmp_path: Path) -> None:
    model, optimizer = script()
    assert newest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        mend.mend_init(model, alone(), optimizer, resume=tmp_path)


def test_a_complete_checkpoint_is_never_overwritten(saved: Path, alone: Configure) -> None:
    model, optimizer = script()
    load(saved, model, optimizer)
    before = (saved / "rack-0" / "manifest.json").read_bytes()
    with mend.session(model, alone(), optimizer, resume=saved) as runtime:
        with pytest.raises(CheckpointError, match="holds a complete checkpoint"):
            runtime.checkpoint(saved)
        step(model, optimizer, STEPS + 1)
        runtime.checkpoint(saved.with_name("second"))
    assert (saved / "rack-0" / "manifest.json").read_bytes() == before
    assert newest_checkpoint(saved.parent) == saved.with_name("second")


def test_what_the_script_raises_leaves_no_checkpoint_and_training_goes_on(
    alone: Configure, tmp_path: Path
) -> None:
    model, optimizer = script()

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device", "model.pt")

    with mend.session(model, alone(), optimizer) as runtime:
        step(model, optimizer, 1)
        with pytest.raises(CheckpointError, match=r"model\.pt: No space left on device"):
            runtime.checkpoint(tmp_path / "cut", full)
        assert list((tmp_path / "cut").iterdir()) == []
        step(model, optimizer, 2)
        runtime.checkpoint(tmp_path / "cut")
    assert newest_checkpoint(tmp_path) == tmp_path / "cut"


def test_weights_that_are_not_the_rack_s_own_are_not_saved(
    alone: Configure, tmp_path: Path
) -> None:
    model, optimizer = script()
    with mend.session(model, alone(), optimizer) as runtime:
        step(model, optimizer, 1)
        with (
            runtime.anchor_weights(),
            pytest.raises(UsageError, match=r"inside `with runtime\.anchor_weights\(\)`"),
        ):
            runtime.checkpoint(tmp_path / "cut")


def test_a_step_that_waits_to_be_counted_is_in_the_checkpoint(
    alone: Configure, tmp_path: Path
) -> None:
    """Without an optimizer the first step counts when a second one shows that mend may count."""
    model, optimizer = script()
    runtime = mend.mend_init(model, alone())
    step(model, optimizer, 1)
    assert runtime.status().step == 0
    runtime.checkpoint(tmp_path / "cut")
    assert runtime.status().step == 1
    assert runtime.shutdown().outcome == "merged"


def test_a_job_without_exchange_has_no_checkpoints(alone: Configure, tmp_path: Path) -> None:
    model, optimizer = script()
    with (
        mend.session(model, alone(exchange=False), optimizer) as runtime,
        pytest.raises(UsageError, match="exchange=False"),
    ):
        runtime.checkpoint(tmp_path / "cut")
