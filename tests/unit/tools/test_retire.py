"""`mend retire`: whom it refuses, and what it says has come of it. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from mend.tools import retire as module
from mend.tools.ports import free_ports
from mend.tools.retire import evicted_life, outcome, refusal
from mend.tools.top.picture import Answer
from mend.types import WITNESS
from tests.unit.status.seen import rack_seen, view

DEAD = 77
"""Incarnation of the life that is over."""


def of(rack: int, **changes: Any) -> Answer:
    """Rack 0 coordinates a job of two; rack 1 is silent there."""
    racks = (rack_seen(0, life=1000), rack_seen(1, live=False, life=DEAD))
    return Answer(f"tcp://rack{rack}:1", view(rack, **{"racks": racks, **changes}), 0.1, "speaks")


def test_a_silent_rack_may_be_retired() -> None:
    assert refusal([of(0)], 1) == ""


def test_a_rack_that_answers_is_alive() -> None:
    """Though nobody hears it: it is behind a cut, and hears the person."""
    said = refusal([of(0), of(1, life=DEAD)], 1)
    assert said == "rack 1 is alive: it answers at tcp://rack1:1. Stop it first"
    assert refusal([of(0), of(1, life=DEAD + 1)], 1) == "", "its next life"


def test_a_rack_that_the_coordinator_hears_is_alive() -> None:
    racks = (rack_seen(0), rack_seen(1, silent_ms=900))
    said = refusal([of(0, racks=racks)], 1)
    assert "rack 0, which coordinates, heard it 900 ms ago" in said
    assert refusal([of(0, racks=racks, coordinates=False)], 1) == "", "what it knows is old"


def test_rack_outside_the_one_job_is_refused() -> None:
    assert "rack 5 has no seat in job 'run7', which has racks 0, 1" in refusal([of(0)], 5)
    assert "has not begun" in refusal([of(0, state="starting")], 1)
    assert "several jobs answer (a, b)" in refusal([of(0, job="b"), of(1, job="a")], 1)


def test_a_rack_without_its_seat_is_out() -> None:
    alone = of(0, racks=(rack_seen(0),))
    assert outcome([alone], 1, DEAD) == ("rack 1 is out; the job goes on with racks 0", True, True)
    again = of(0, racks=(rack_seen(0), rack_seen(1, life=DEAD + 1)))
    assert outcome([again], 1, DEAD)[1], "its next life has the seat"
    lagging = of(0, racks=(rack_seen(0),), coordinates=False)
    assert not outcome([lagging], 1, DEAD)[1]


def test_a_rack_that_was_evicted_and_is_not_back_may_be_retired() -> None:
    """It has no seat that it could lose: that was the reason to refuse it, and so for ever."""
    racks = (rack_seen(0, life=1000), rack_seen(2))
    waits = of(0, racks=racks, evicted=(1,), evicted_lives=(DEAD,))
    assert refusal([waits], 1) == ""
    assert evicted_life([waits], 1) == DEAD
    assert "rack 3 has no seat" in refusal([waits], 3)
    assert refusal([waits, of(1, life=DEAD + 1)], 1) == (
        "rack 1 is alive: it answers at tcp://rack1:1, and joins the job again"
    )
    assert not outcome([waits], 1, DEAD)[1]
    over = of(0, racks=racks)
    assert outcome([over], 1, DEAD) == (
        "rack 1 is out; the job goes on with racks 0, 2",
        True,
        True,
    )


def test_retirement_names_the_other_racks_missing_for_a_quorum() -> None:
    racks = tuple(rack_seen(rack, life=DEAD) for rack in range(3))
    left = of(2, racks=racks, coordinates=False, retired=(1,))
    told, final, _ = outcome([left], 1, DEAD)
    assert final
    assert told == (
        "rack 1 is retired (rack 2 knows it); there is no quorum without 0: start it again, or "
        "`mend retire 0`"
    )


def test_retirement_with_a_rack_that_only_the_coordinator_hears_waits_on() -> None:
    """It said that there is no quorum without rack 2, which trained."""
    racks = (rack_seen(0), rack_seen(1, live=False, life=DEAD), rack_seen(2))
    told, final, _ = outcome([of(0, racks=racks, retired=(1,))], 1, DEAD)
    assert not final
    assert told.startswith("rack 1 is retired (rack 0 knows it); the remaining racks have not")
    silent = (*racks, rack_seen(3, live=False))
    told, final, _ = outcome([of(0, racks=silent, retired=(1,))], 1, DEAD)
    assert not final
    assert "there is no quorum without 3: start it again" in told


def test_with_the_witness_alone_all_begin_anew() -> None:
    last = of(WITNESS, coordinates=False, retired=(0, 1))
    told, final, _ = outcome([last], 1, DEAD)
    assert final
    assert told.endswith("start all racks again to begin a new job under this name")


def test_retirement_that_no_process_accepts_says_so() -> None:
    told, final, accepted = outcome([of(0)], 1, DEAD)
    assert not final
    assert not accepted
    assert told.startswith("no process accepted it")


def test_retire_that_nobody_answers_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "FIRST_S", 0.1)
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    assert module.retire(1, (address,), "", 1.0) == 1
    assert f"nobody answers. {address}: no connection: no process" in capsys.readouterr().err
