"""One picture out of what several processes say, each of which knows a part."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from mend.coordination.messages import FailSlow
from mend.status.messages import JobStatus
from mend.tools.top.picture import (
    LATE_S,
    SLOW_RATIO,
    Answer,
    Picture,
    RackLine,
    addresses_of,
    is_over,
    picture_of,
)
from mend.types import SECOND, WITNESS
from tests.unit.status.seen import rack_seen, training_seen, view


def answered(*views: JobStatus, age_s: float = 0.1) -> list[Answer]:
    return [Answer(f"tcp://rack{each.rack}:1", each, age_s, "speaks") for each in views]


def seen(*views: JobStatus) -> Picture:
    return picture_of(answered(*views))


def lines(picture: Picture) -> dict[int, RackLine]:
    return {line.rack: line for line in picture.racks}


def witness(**changes: Any) -> JobStatus:
    fields: dict[str, Any] = {
        "coordinator": WITNESS, "coordinates": True, "training": None,
        "racks": (rack_seen(0, step=96), rack_seen(1, step=64, step_ns=SECOND // 4, behind=2)),
    }  # fmt: skip
    return view(WITNESS, **{**fields, **changes})


def test_a_rack_speaks_for_itself() -> None:
    line = lines(seen(view(0, training=training_seen(ranks=4))))[0]
    assert (line.state, line.source, line.step, line.ranks) == ("running", "itself", 100, 4)
    assert line.steps_per_s == pytest.approx(10)
    assert line.tokens_per_s == pytest.approx(4 * 640), "counted at the leader, times its ranks"
    assert line.stall_share == pytest.approx(0.01)
    assert line.stall_s == pytest.approx(0.12)
    assert (line.sent_per_s, line.received_per_s) == (pytest.approx(1e6), pytest.approx(2e6))
    assert line.step_ms == pytest.approx(100)


def test_silent_rack_is_shown_as_the_coordinator_sees_it() -> None:
    line = lines(seen(witness()))[1]
    assert (line.state, line.source) == ("running", "the witness")
    assert (line.step, line.behind, line.step_ms) == (64, 2, 250)
    assert (line.steps_per_s, line.stall_share, line.sent_per_s) == (None, None, None)


def test_coordinator_is_preferred_about_other_racks() -> None:
    """Rack 0 knows little of rack 1; asked alone it gives what it has."""
    vague = view(0, coordinator=WITNESS, coordinates=False, racks=(
        rack_seen(0), rack_seen(1, step=48, step_ns=0, behind=-1, silent_ms=-1),
    ))  # fmt: skip
    alone = lines(seen(vague))[1]
    assert (alone.step, alone.source, alone.behind) == (48, "rack 0", None)
    assert lines(seen(vague, witness()))[1].source == "the witness"


def test_lag_is_behind_the_rack_that_is_furthest() -> None:
    found = lines(seen(witness(), view(0, coordinates=False)))
    assert (found[0].lag_steps, found[1].lag_steps) == (0, 100 - 64)


@pytest.mark.parametrize(
    ("step_ms", "slow"),
    [
        ((100, 210), {1: 2.1}),
        ((100, 149), {}),
        ((100, 150), {1: SLOW_RATIO}),
        ((100, 110, 400), {2: 400 / 110}),
        ((100, 300, 300), {}),  # the median is the slow ones': nothing is suspected
        ((100, 0), {}),
        ((100,), {}),
    ],
)
def test_slow_is_a_ratio_to_the_median_of_the_racks(
    step_ms: tuple[int, ...], slow: dict[int, float]
) -> None:
    racks = tuple(rack_seen(r, step_ns=ms * 1_000_000) for r, ms in enumerate(step_ms))
    found = seen(witness(racks=racks)).racks
    assert {r.rack: r.slow for r in found if r.slow is not None} == pytest.approx(slow)


def test_states_of_racks() -> None:
    racks = (
        rack_seen(0),
        rack_seen(1, live=False, silent_ms=4000),
        rack_seen(2, newcomer=True),
        rack_seen(3, leaving=True),
    )
    found = seen(witness(racks=racks, missing=(5,)))
    assert [line.state for line in found.racks] == [
        "running", "silent", "joining", "leaving", "absent",
    ]  # fmt: skip
    assert lines(found)[1].silent_s == 4.0
    assert "no hello yet from rack 5" in found.notices


def test_for_how_long_a_rack_was_silent_is_for_the_others_to_say() -> None:
    """It is cut off from them, answers mend top, and has heard itself 0 ms ago."""
    racks = (rack_seen(0), rack_seen(1, live=False, silent_ms=4000))
    found = seen(witness(racks=racks), view(1, racks=(rack_seen(1, silent_ms=0),)))
    line = lines(found)[1]
    assert (line.state, line.source, line.silent_s) == ("silent", "itself", 4.0)
    alone = lines(seen(view(1, racks=(rack_seen(1, live=False, silent_ms=0),))))[1]
    assert (alone.state, alone.silent_s) == ("silent", None), "nobody else answers"


def test_a_rack_that_stopped_answering_is_described_by_others() -> None:
    old, fresh = answered(view(1), age_s=LATE_S + 1), answered(witness())
    found = picture_of(old + fresh)
    line = lines(found)[1]
    assert (line.source, line.step, line.steps_per_s) == ("the witness", 64, None)
    assert found.silent == ("tcp://rack1:1: no answer for 4 s",)


def test_when_nobody_answers_any_more_the_last_picture_stays() -> None:
    found = picture_of([Answer("tcp://rack0:1", view(0), 9.0, "closed")])
    assert found.state == "nobody"
    assert lines(found)[0].step == 100
    assert "the process or the route to it is gone" in found.silent[0]


@pytest.mark.parametrize(
    ("way", "job", "said"),
    [
        ("closed", "", "no process listens there"),
        ("open", "", "not a sideband of mend"),
        ("speaks", "", "observe=false"),
        ("speaks", "run8", "not of job 'run8'"),
    ],
)
def test_an_address_without_an_answer_says_why(way: str, job: str, said: str) -> None:
    found = picture_of([Answer("tcp://x:1", None, 1.0, way)], job=job)
    assert (found.state, found.job, found.racks) == ("nobody", job, ())
    (line,) = found.silent
    assert line.startswith("tcp://x:1: ")
    assert said in line


def test_a_job_is_over_when_its_log_says_so_or_all_have_gone() -> None:
    assert not is_over([])
    assert not is_over(answered(view(0), view(1)))
    assert not is_over(answered(view(0, state="ended"), view(1)))
    assert not is_over(answered(view(0, state="ended"))), "rack 1 may train on"
    assert is_over(answered(view(0, state="ended"), view(1, state="ended")))
    assert is_over(answered(view(0, state="ended", over=True, racks=())))
    assert seen(view(0, state="ended", over=True), view(1)).state == "ended"


@pytest.mark.parametrize(
    "last",
    [
        [view(0, state="ended"), view(1, state="ended")],
        [view(0, state="ended", over=True), view(1)],
        [view(0, state="ended", over=True, racks=(rack_seen(0), rack_seen(1, leaving=True)))],
        [view(0, state="ended", over=True, racks=(rack_seen(0), rack_seen(1, live=False))),
         view(1, state="ended")],
    ],
)  # fmt: skip
def test_job_that_is_over_shows_every_rack_as_ended(last: list[JobStatus]) -> None:
    found = seen(*last)
    assert found.state == "ended"
    assert [line.state for line in found.racks] == ["ended", "ended"]
    assert (found.in_flight, found.rounds, found.notices) == (0, (), ())


def test_rack_that_died_before_the_end_stays_silent() -> None:
    racks = (rack_seen(0), rack_seen(1, live=False, silent_ms=4000))
    found = seen(view(0, state="ended", over=True, racks=racks))
    assert [line.state for line in found.racks] == ["ended", "silent"]


def test_the_job_goes_on_until_the_last_rack_leaves() -> None:
    first = view(0, state="leaving", racks=(rack_seen(0, leaving=True), rack_seen(1)))
    assert seen(first).state == "running"
    both = tuple(rack_seen(rack, leaving=True) for rack in range(2))
    assert seen(view(0, state="leaving", racks=both)).state == "leaving"
    assert seen(view(0, state="leaving", racks=both), view(1)).state == "running"


def test_a_rack_that_ended_alone_is_named_with_its_reason() -> None:
    gone = view(1, state="ended", detail="GaveUp: no quorum")
    found = seen(view(0), gone)
    assert found.state == "running"
    assert "rack 1 has ended: GaveUp: no quorum" in found.notices
    assert found.silent == ()


def test_two_jobs_and_two_versions_are_told() -> None:
    found = seen(view(0), view(1, mend="0.2.0"), view(3, job="run8"))
    assert "different versions of mend: 0.1.0, 0.2.0" in found.notices
    assert "rack 3 of another job also answers: run8" in found.notices
    assert set(lines(found)) == {0, 1}


def test_a_slow_link_is_told_with_its_direction_and_by_how_much() -> None:
    link = FailSlow(1, 3, True, 400, 41, 999, "link", 0, of_link=True)
    (notice,) = seen(view(0, slow=(link,))).notices
    assert notice == (
        "the link 1 -> 0 is slow: pulls by rank 3 of rack 0 take 4.1x the time per byte of its own "
        "past, since its step 400 (99.9 % sure)"
    )


def test_evicted_rack_that_is_not_back_is_noticed_with_the_remedy() -> None:
    (notice,) = seen(view(0, evicted=(2,))).notices
    assert notice.startswith("rack 2 was evicted because it was slow: start it again")


def test_slow_racks_are_told_with_what_they_are_compared_with() -> None:
    slow = (FailSlow(1, 3, True, 400, 21, 999), FailSlow(1, 3, False, 410, 20))
    own, peers = seen(view(0, slow=slow)).notices
    assert own.startswith("rack 1 is slow: 2.1x the time per token of its own past, since its step")
    assert peers.endswith(
        "2.0x the time per token of the median of the others, seen at its step 410"
    )


def test_the_others_are_found_through_one() -> None:
    assert addresses_of(view(0)) == ["tcp://rack1:1"]
    assert addresses_of(witness()) == ["tcp://rack0:1", "tcp://rack1:1"]


def test_rounds_and_policy_come_through() -> None:
    found = seen(view(0, ballot=2, lockstep=True))
    assert (found.ballot, found.lockstep, found.commits, found.closed_by) == (2, True, 8, "all-in")
    (round_,) = found.rounds
    assert (round_.fragment, round_.version, round_.phase) == (1, 5, "open")
    assert (round_.for_s, round_.why) == (0.4, "waiting for rack 1")


def test_picture_with_any_recorded_value_is_valid_json() -> None:
    recorded = (("loss", 2.5), ("worst", float("inf")), ("none", float("nan")))
    found = seen(view(0, training=training_seen(recorded=recorded, recent_step_ns=0, recent_ns=0)))
    text = json.dumps(asdict(found), allow_nan=False)
    rack = json.loads(text)["racks"][0]
    assert rack["recorded"] == {"loss": 2.5, "worst": "inf", "none": "nan"}
    assert rack["steps_per_s"] is None
