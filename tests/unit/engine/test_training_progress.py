"""How far training has come, as events: exact pairs of tokens and time, and recorded numbers."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
import torch

from mend.engine.compute.agreement import Agreement
from mend.engine.state.training_progress import VALUES_MAX, TrainingProgress
from mend.errors import UsageError
from mend.types import SECOND
from tests.noted import pair


class Events:
    """What the recorder is told; and what was sent and received, in bytes."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, dict[str, Any]]] = []
        self.pace = TrainingProgress(lambda event: self.noted.append(pair(event)), lambda: (70, 50))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for each, fields in self.noted if each == kind]


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.mark.parametrize("day", [-1, 400])
def test_a_system_clock_that_is_set_meanwhile_moves_no_times(
    events: Events, monkeypatch: pytest.MonkeyPatch, day: int
) -> None:
    """`mend top` showed 52,400 steps per second, `mend report` a run of 400 days."""
    events.pace.stepped(1, 512, 0)
    jumped_ns = time.time_ns() + day * 86_400 * SECOND
    monkeypatch.setattr(time, "time_ns", lambda: jumped_ns)
    events.pace.stepped(2, 1024, 0)
    events.pace.write()
    first, second = events.of("progress")
    assert 0 <= second["at_ns"] - first["at_ns"] < 60 * SECOND


def test_the_first_step_starts_the_clock_and_later_ones_are_written_when_the_loop_asks(
    events: Events,
) -> None:
    events.pace.write()
    assert events.noted == []  # nothing has been trained
    events.pace.stepped(1, 512, 0)
    for step in range(2, 6):
        events.pace.stepped(step, 512 * step, 3_000_000)
    events.pace.write()
    first, second = events.of("progress")
    assert (first["step"], first["tokens"], second["step"], second["tokens"]) == (1, 512, 5, 2560)
    assert second["at_ns"] == events.pace.latest[2] >= first["at_ns"]
    assert second["stall_ms_total"] == 3.0
    assert (second["bytes_sent"], second["bytes_received"]) == (70, 50)
    assert "last" not in second


def test_values_recorded_before_the_first_step_belong_to_the_end_of_the_start(
    events: Events,
) -> None:
    """It was of the time before the wait for the other racks, by which `mend report` made the run
    longer; and of step 0 in a job that resumed at another one."""
    before_ns = events.pace.latest[2]
    time.sleep(0.01)
    events.pace.begin(40, 900)
    events.pace.record({"loss": 1.0})
    (recorded,) = events.of("recorded")
    assert (recorded["step"], recorded["tokens"]) == (40, 900)
    assert recorded["at_ns"] >= before_ns + 10_000_000
    events.pace.write()
    assert not events.of("progress"), "nothing has been trained"


def test_the_end_is_written_once(events: Events) -> None:
    events.pace.stepped(1, 512, 0)
    events.pace.end()
    events.pace.end()
    assert [each.get("last") for each in events.of("progress")] == [None, True]


def test_record_after_the_end_warns_once_and_records_nothing(events: Events) -> None:
    """It raised, in scripts that log a last evaluation and then save the model."""
    events.pace.end()
    with pytest.warns(UserWarning, match="after mend_shutdown"):
        events.pace.record({"loss": 1.0})
    events.pace.record({"loss": 2.0})  # a second warning would be an error
    assert events.of("recorded") == []


def test_a_job_that_never_made_a_step_has_no_progress(events: Events) -> None:
    events.pace.end()
    assert events.noted == []


def test_recorded_numbers_keep_all_bits_and_belong_to_the_last_step(events: Events) -> None:
    events.pace.stepped(1, 512, 0)
    loss = math.nextafter(2.3, 3)
    events.pace.record({"loss": loss, "rate": 1})
    (recorded,) = events.of("recorded")
    assert (recorded["step"], recorded["tokens"]) == (1, 512)
    assert recorded["at_ns"] == events.pace.latest[2]
    assert json.loads(json.dumps(recorded["values"])) == {"loss": loss, "rate": 1.0}
    assert events.pace.recorded == {"loss": loss, "rate": 1.0}


def test_recorded_nan_and_inf_stay_readable_json(events: Events) -> None:
    events.pace.record({"loss": math.nan, "norm": math.inf, "least": -math.inf})
    (recorded,) = events.of("recorded")
    said = json.loads(json.dumps(recorded["values"], allow_nan=False))
    assert said == {"loss": "nan", "norm": "inf", "least": "-inf"}
    assert math.isnan(float(said["loss"]))


@pytest.mark.parametrize("value", [torch.tensor(1.0), "1.0", None])
def test_a_tensor_is_refused_with_the_remedy(events: Events, value: Any) -> None:
    with pytest.raises(UsageError, match=r"loss\.item\(\)"):
        events.pace.record({"loss": value})
    assert events.noted == []


def test_the_number_of_values_has_a_limit(events: Events) -> None:
    with pytest.raises(UsageError, match=f"at most {VALUES_MAX}"):
        events.pace.record({f"v{i}": 1.0 for i in range(VALUES_MAX + 1)})


def test_racks_that_point_apart_are_warned_of_once_by_one_rank() -> None:
    seen = Agreement(40, 40, -20.0, -20.0)
    for warns in (True, False):
        noted: list[tuple[str, dict[str, Any]]] = []
        pace = TrainingProgress(
            lambda event, noted=noted: noted.append(pair(event)),
            lambda: (0, 0),
            lambda: seen,
            warns=warns,
        )
        pace.stepped(1, 10, 0)
        pace.end()
        apart = [fields for kind, fields in noted if kind == "racks-apart"]
        assert [each["cosine"] for each in apart] == [-0.5] * warns
