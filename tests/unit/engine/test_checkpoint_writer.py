"""What is left of a script's `save`, and what the handle of a checkpoint says."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mend.consensus.records import CheckpointRecord
from mend.engine.checkpoint.checkpoint_writer import CheckpointWriter, PendingCheckpoint, rest_of
from mend.engine.io.rack import RackGroup
from mend.errors import CheckpointError, GaveUp
from mend.events.base import kind_of
from mend.types import SECOND
from tests.unit.engine.hand import Hand


def done(value: object = None) -> Future[object]:
    future: Future[object] = Future()
    future.set_result(value)
    return future


def test_rest_of_a_save_is_a_function_or_a_future_and_else_ignored() -> None:
    assert rest_of(lambda: "called")() == "called"
    assert rest_of(done("awaited"))() == "awaited"
    assert rest_of(None)() is None
    assert rest_of(12)() is None, "what a lambda happened to return"


@dataclass
class Response:
    """As torch.distributed.checkpoint.async_save gives it where it also copies in the
    background."""

    staging_completion: Future[object]
    upload_completion: Future[object]


def test_a_copy_that_torch_makes_is_awaited_before_training_goes_on() -> None:
    upload: Future[object] = Future()
    failed: Future[object] = Future()
    failed.set_exception(ValueError("no memory"))
    with pytest.raises(ValueError, match="no memory"):
        rest_of(Response(failed, upload))
    rest = rest_of(Response(done(), upload))
    upload.set_result("uploaded")
    assert rest() == "uploaded"


def pending(error: Exception | None) -> PendingCheckpoint:
    written: Future[None] = Future()
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)
    return PendingCheckpoint(Path("cuts/one"), written)


def test_every_failure_is_a_checkpoint_error_with_its_cause() -> None:
    for cause, said in (
        (ValueError("gone"), "'one' is not complete: ValueError: gone"),
        (GaveUp("this rack has left the job"), "'one' is not complete: this rack has left"),
        (CheckpointError("racks 1 have not written it"), "^racks 1 have not"),
    ):
        with pytest.raises(CheckpointError, match=said):
            pending(cause).result()
    cancelled: Future[None] = Future()
    cancelled.cancel()
    with pytest.raises(CheckpointError, match="this rack has left the job"):
        PendingCheckpoint(Path("one"), cancelled).result()


def test_a_failure_that_somebody_has_asked_for_is_not_told_again() -> None:
    one = pending(ValueError("gone"))
    assert one.done()
    assert isinstance(one.unasked(), CheckpointError)
    with pytest.raises(CheckpointError):
        one.result()
    assert one.unasked() is None
    assert pending(None).unasked() is None
    assert pending(None).result() == Path("cuts/one")


def test_a_wait_that_is_too_long_says_for_what() -> None:
    waiting = PendingCheckpoint(Path("cuts/one"), Future())
    with pytest.raises(TimeoutError, match=r"^checkpoint 'one' is not complete after 0.01 s$"):
        waiting.result(0.01)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (CheckpointError("racks 1 have not written it"), "racks 1 have not written it"),
    ],
)
def test_a_late_error_names_both_checkpoints(cause: Exception, said: str) -> None:
    former = pending(cause)
    error = former.unasked()
    assert error is not None
    later = former.late_error("after is being written")
    assert isinstance(later, CheckpointError)
    assert str(later) == (
        f"the checkpoint before this one, 'one', is not complete: {said}. after is being written"
    )


def test_the_training_loop_knows_while_one_is_being_written() -> None:
    hand, written = Hand(), Future[None]()
    writer = CheckpointWriter(
        RackGroup(None, 1.0), 0, (), hand.trainer, drive=hand.run, post=hand.events.append,
        note=lambda *_: None, now_ns=lambda: 0,
    )  # fmt: skip
    assert not hand.trainer.life.writes
    hand.trainer.life.writing = PendingCheckpoint(Path("one"), written)
    assert hand.trainer.life.writes
    written.set_result(None)
    assert not hand.trainer.life.writes
    assert writer.close() == []


@pytest.mark.parametrize("saves", [False, True])
def test_a_checkpoint_that_moves_the_weights_says_so_unless_it_saves_them(saves: bool) -> None:
    """HF calls on_save after it has written the model. The cut then applied merged weights, and
    the checkpoint could never be resumed, which only the next start noticed."""
    hand, notes = Hand(), list[str]()

    def applies(doing: Any) -> CheckpointRecord:
        doing.close()
        state = hand.trainer.fragment_states[0]
        state.anchor = dataclasses.replace(state.anchor, version=1)
        return CheckpointRecord(1, "step-1", "ab" * 32, (0,))

    writer = CheckpointWriter(
        RackGroup(None, 1.0), 0, (), hand.trainer, drive=applies, post=hand.events.append,
        note=lambda event: notes.append(kind_of(event)), now_ns=lambda: 0,
    )  # fmt: skip
    save = (lambda _: None) if saves else None
    with pytest.raises(CheckpointError, match="cannot be made"):
        writer.checkpoint(Path("/proc/nowhere/step-1"), save, SECOND, wait=True)
    assert notes == ([] if saves else ["checkpoint-moved"])
    assert writer.close() == []
