"""A checkpoint that is not what it should be is refused by name, and training is not begun on it.
A job of one rank, in this process."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import mend
from mend.engine.checkpoint.checkpoint_files import newest_checkpoint
from mend.errors import CheckpointError, UsageError
from tests.process import train
from tests.process.conftest import Configure
from tests.process.racks import until
from tests.process.train import fresh, make_steps

STEPS = 13
"""Behind a capture at step 12, so that an offer may be open."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    make_steps(model, optimizer, number, number)


@pytest.fixture
def saved(alone: Configure, tmp_path: Path) -> Path:
    """A complete checkpoint; the job has ended."""
    model, optimizer = fresh()
    folder = tmp_path / "cuts" / "first"
    with mend.session(model, alone(), optimizer) as runtime:
        make_steps(model, optimizer, 1, STEPS)
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
    model, optimizer = fresh()
    load(saved, model, optimizer)
    with mend.session(model, config, optimizer, resume=path or saved) as runtime:
        return runtime.status()


def test_step_tokens_versions_and_what_is_open_come_back(saved: Path, alone: Configure) -> None:
    manifest = json.loads((saved / "rack-0" / "manifest.json").read_text())
    status = begin(saved, alone(), saved.parent)
    assert status.step == status.tokens == STEPS
    assert list(status.versions) == manifest["versions"]
    assert status.ledger.open == manifest["open_tokens"] > 0


def cut_after_one_step(
    config: mend.MendConfig, folder: Path, save: Callable[[Path], None]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with the weights that it had at the checkpoint."""
    model, optimizer = fresh()
    with mend.session(model, config, optimizer) as runtime:
        step(model, optimizer, 1)
        runtime.checkpoint(folder, save)
        weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    return model, optimizer


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
    folder = tmp_path / "cut"

    def notes(path: Path) -> None:
        (path / "notes.txt").write_text("of the script")

    model, optimizer = cut_after_one_step(alone(), folder, notes)
    harm(folder / "rack-0" / name, place)
    with pytest.raises(CheckpointError, match=said):
        mend.mend_init(model, alone(), optimizer, resume=folder)


def test_a_file_of_the_script_may_have_two_dots_in_its_name(
    alone: Configure, tmp_path: Path
) -> None:
    """Such a checkpoint was complete, and refused as damaged where it was to be resumed."""
    model, optimizer = cut_after_one_step(
        alone(), tmp_path / "cut", lambda path: (path / "part..0.bin").touch()
    )
    with mend.session(model, alone(), optimizer, resume=tmp_path / "cut") as runtime:
        assert runtime.status().step == 1


@pytest.mark.parametrize(
    "name", ["rank-0.safetensors", "registered-0.safetensors", "manifest.json", "COMPLETE"]
)
def test_a_file_of_the_script_under_a_name_of_mend_s_is_refused(
    alone: Configure, tmp_path: Path, name: str
) -> None:
    """The script's file was overwritten without a word, or the complete checkpoint was damaged."""
    model, optimizer = fresh()
    folder = tmp_path / "cut"

    def save(path: Path) -> None:
        (path / name).write_text("of the script")

    with mend.session(model, alone(), optimizer) as runtime:
        step(model, optimizer, 1)
        for late in (save, lambda path: lambda: save(path)):
            with pytest.raises(CheckpointError, match=f"{name!r}.*give that file another name"):
                runtime.async_checkpoint(folder, late).result()
        assert newest_checkpoint(tmp_path) is None
        runtime.checkpoint(folder)
    assert newest_checkpoint(tmp_path) == folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sync_period_steps": 16}, "sync_period_steps was 8, is 16 here"),
        ({"codec": "bfloat16"}, "was float32, is bfloat16 here"),
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
    model, optimizer = fresh()
    with pytest.raises(CheckpointError, match=r"do not hold what .* has of step 13"):
        mend.mend_init(model, alone(), optimizer, resume=saved)


def test_a_folder_without_a_checkpoint_is_refused(alone: Configure, tmp_path: Path) -> None:
    model, optimizer = fresh()
    assert newest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        mend.mend_init(model, alone(), optimizer, resume=tmp_path)


def test_a_complete_checkpoint_is_never_overwritten(saved: Path, alone: Configure) -> None:
    model, optimizer = fresh()
    load(saved, model, optimizer)
    before = (saved / "rack-0" / "manifest.json").read_bytes()
    with mend.session(model, alone(), optimizer, resume=saved) as runtime:
        with pytest.raises(CheckpointError, match="holds a complete checkpoint"):
            runtime.checkpoint(saved)
        step(model, optimizer, STEPS + 1)
        runtime.checkpoint(saved.with_name("second"))
    assert (saved / "rack-0" / "manifest.json").read_bytes() == before
    assert newest_checkpoint(saved.parent) == saved.with_name("second")


def test_error_in_the_save_function_leaves_no_checkpoint_and_training_continues(
    alone: Configure, tmp_path: Path
) -> None:
    model, optimizer = fresh()

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
    model, optimizer = fresh()
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
    model, optimizer = fresh()
    runtime = mend.mend_init(model, alone())
    step(model, optimizer, 1)
    assert runtime.status().step == 0
    runtime.checkpoint(tmp_path / "cut")
    assert runtime.status().step == 1
    assert runtime.shutdown().outcome == "merged"


def test_a_job_without_exchange_has_no_checkpoints(alone: Configure, tmp_path: Path) -> None:
    model, optimizer = fresh()
    with (
        mend.session(model, alone(exchange=False), optimizer) as runtime,
        pytest.raises(UsageError, match="exchange=False"),
    ):
        runtime.checkpoint(tmp_path / "cut")


# ------------------------------------------------------------------ in the background


def test_training_goes_on_while_a_checkpoint_is_written(alone: Configure, tmp_path: Path) -> None:
    """What is written is of the step of the call, whatever is merged meanwhile."""
    model, optimizer = fresh()
    folder, gate = tmp_path / "cuts" / "first", threading.Event()

    def later(path: Path) -> Callable[[], object]:
        kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        return lambda: gate.wait() and torch.save(kept, path / "script.pt")

    with mend.session(model, alone(), optimizer) as runtime:
        make_steps(model, optimizer, 1, STEPS)
        pending = runtime.async_checkpoint(folder, later)
        versions = runtime.status().versions
        make_steps(model, optimizer, STEPS + 1, STEPS + 29)
        assert all(
            now > then for now, then in zip(runtime.status().versions, versions, strict=True)
        )
        assert not pending.done()
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        assert newest_checkpoint(folder.parent) is None
        gate.set()
        assert pending.result() == pending.path == folder
        assert pending.done()
    status = begin(folder, alone(), folder.parent)
    assert status.step == status.tokens == STEPS
    assert status.versions == versions


def full(_: Path) -> Callable[[], object]:
    def fails() -> None:
        raise OSError(28, "No space left on device", "model.pt")

    return fails


def test_a_failure_in_the_background_comes_out_once_and_typed(
    alone: Configure, tmp_path: Path
) -> None:
    """At the next call, which makes the next one all the same; or where the script asks."""
    model, optimizer = fresh()
    said = r"model\.pt: No space left on device"
    with mend.session(model, alone(), optimizer) as runtime:
        step(model, optimizer, 1)
        runtime.async_checkpoint(tmp_path / "one", full)
        step(model, optimizer, 2)
        before = f"^the checkpoint before this one, 'one', is not complete: .*{said}"
        with pytest.raises(CheckpointError, match=rf"{before}\. 'two' is being written$"):
            runtime.async_checkpoint(tmp_path / "two")
        step(model, optimizer, 3)
        asked = runtime.async_checkpoint(tmp_path / "three", full)
        assert newest_checkpoint(tmp_path) == tmp_path / "two"
        with pytest.raises(CheckpointError, match=said):
            asked.result()
        step(model, optimizer, 4)
        assert runtime.checkpoint(tmp_path / "four") == tmp_path / "four"
    assert list((tmp_path / "three").iterdir()) == []


def test_the_end_waits_for_what_is_written_and_says_when_it_failed(
    alone: Configure, tmp_path: Path
) -> None:
    model, optimizer = fresh()
    ending = contextlib.ExitStack()
    runtime = ending.enter_context(mend.session(model, alone(), optimizer))
    step(model, optimizer, 1)
    runtime.async_checkpoint(tmp_path / "one", full)
    with pytest.raises(CheckpointError, match="No space left"):
        ending.close()
    assert runtime.status().outcome == "merged"
    runtime = mend.mend_init(model, alone(), optimizer)
    step(model, optimizer, 2)
    written: Future[None] = Future()
    runtime.async_checkpoint(tmp_path / "two", lambda _: written)
    threading.Timer(0.2, written.set_exception, [ValueError("of the script")]).start()
    with pytest.warns(UserWarning, match="'two' is not complete: ValueError: of the script"):
        status = mend.mend_shutdown(model)
    assert status is not None
    assert status.outcome == "merged"
    assert newest_checkpoint(tmp_path) is None
    for call in (runtime.checkpoint, runtime.async_checkpoint):
        with pytest.raises(UsageError, match=rf"^{call.__name__}\(\) after mend_shutdown"):
            call(tmp_path / "three")


def test_a_rack_that_is_aborted_leaves_no_complete_checkpoint(
    alone: Configure, tmp_path: Path
) -> None:
    model, optimizer = fresh()
    written: Future[None] = Future()
    runtime = mend.mend_init(model, alone(), optimizer)
    step(model, optimizer, 1)
    pending = runtime.async_checkpoint(tmp_path / "one", lambda _: written)

    def write_once_it_leaves() -> None:
        until(lambda: runtime.status().outcome == "abandoned", "it leaves")
        written.set_result(None)

    writing = threading.Thread(target=write_once_it_leaves)
    writing.start()
    runtime.abort()
    writing.join()
    with pytest.raises(CheckpointError, match="'one' is not complete: this rack has left the job"):
        pending.result()
    assert newest_checkpoint(tmp_path) is None


# ------------------------------------------------------------------ inside torch's checkpoints

of_one_process = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass
class Place:
    """In the data."""

    at: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


@pytest.fixture
def saved_by_torch(alone: Configure, tmp_path: Path) -> Path:
    """At STEPS."""
    model, optimizer = fresh()
    folder = tmp_path / "torch"
    with mend.session(model, alone(), optimizer) as runtime:
        runtime.register_state("place", Place(7), scope="rack")
        make_steps(model, optimizer, 1, STEPS)
        weights, moments = get_state_dict(model, optimizer)
        state = {"mend": runtime.checkpoint_state(), "model": weights, "optimizer": moments}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        with pytest.raises(CheckpointException, match=r"save runtime\.checkpoint_state\(\)"):
            dcp.save({"mend": runtime}, checkpoint_id=tmp_path / "wrong", no_dist=True)
    return folder


def load_by_torch(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    saved = mend.SavedState(folder)
    weights, moments = get_state_dict(model, optimizer)
    loaded = {"mend": saved, "model": weights, "optimizer": moments}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return saved


@of_one_process
def test_a_job_goes_on_from_a_checkpoint_that_torch_has_written(
    saved_by_torch: Path, alone: Configure
) -> None:
    model, optimizer = fresh()
    saved = load_by_torch(saved_by_torch, model, optimizer)
    with mend.session(model, alone(), optimizer, resume=saved) as runtime:
        status = runtime.status()
        assert status.step == status.tokens == STEPS
        assert status.ledger.open > 0
        place = Place()
        runtime.register_state("place", place, scope="rack")
        assert place.at == 7
        step(model, optimizer, STEPS + 1)


@of_one_process
def test_saved_state_that_is_not_loaded_or_does_not_match_is_refused(
    saved_by_torch: Path, alone: Configure, tmp_path: Path
) -> None:
    model, optimizer = fresh()
    with pytest.raises(CheckpointError, match="was not loaded"):
        mend.mend_init(model, alone(), optimizer, resume=mend.SavedState(saved_by_torch))
    with pytest.raises(CheckpointError, match="is not of rank 1 of one rack"):
        mend.SavedState(saved_by_torch, rank=1)
    with pytest.raises(CheckpointError, match="nothing under 'other'"):
        mend.SavedState(saved_by_torch, "other")
    with pytest.raises(CheckpointError, match="there is no DCP checkpoint"):
        mend.SavedState(tmp_path / "nothing")
    saved = mend.SavedState(saved_by_torch)
    dcp.load({"mend": saved}, checkpoint_id=saved_by_torch, no_dist=True)
    with pytest.raises(CheckpointError, match=r"do not hold what .* has of step 13"):
        mend.mend_init(model, alone(), optimizer, resume=saved)
    with pytest.raises(CheckpointError, match="another plan: sync_period_steps was 8, is 16"):
        mend.mend_init(model, alone(sync_period_steps=16), optimizer, resume=saved)


@of_one_process
def test_one_wrong_bit_in_what_torch_has_loaded_is_refused(
    saved_by_torch: Path, alone: Configure
) -> None:
    """An anchor by its digest, the rest by its checksum."""
    model, optimizer = fresh()
    saved = load_by_torch(saved_by_torch, model, optimizer)
    ((who, loaded),) = saved.state_dict().items()
    loaded["registered"][-1] ^= 1
    with pytest.raises(CheckpointError, match="registered of rack-0-rank-0 is damaged"):
        saved.load_state_dict({who: loaded})
    loaded["registered"][-1] ^= 1
    loaded["0.anchor"].view(torch.int32)[0] ^= 1
    saved.load_state_dict({who: loaded})
    with pytest.raises(CheckpointError, match="fragment 0 has another digest"):
        mend.mend_init(model, alone(), optimizer, resume=saved)
