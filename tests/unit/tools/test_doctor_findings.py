"""What a meeting means: measurements in, findings out, each with what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mend.tools.doctor.findings import WINDOW_MS_MIN, of_meeting, window_mbit
from mend.tools.doctor.terms import Finding, Flow, Meeting, Seen, rate

FACTS = {
    "mend version": "0.1.0",
    "tau": "8",
    "codec": "int8",
    "ramp_rounds": "10",
    "sync_period_steps": "128",
    "ranks per rack": "",
}
VERSIONS = {"python": "3.11.7", "torch": "2.9"}

GOOD = Seen(
    rack=1, address="tcp://b:21901", heard=True, hears_us=True, host="b", lane="b:22000",
    versions=VERSIONS, facts=FACTS, wishes={"sideband_heartbeat_ms": "100"}, trips=50, asked=50,
    p50_ms=1.0, p99_ms=2.0, clock_ms=0.5, here=Flow(940.0, 64.0), there=Flow(930.0, 64.0),
    together=Flow(900.0, 64.0),
)  # fmt: skip


def seen_from_rack_0(*peers: Seen, **more: Any) -> Meeting:
    usual: dict[str, Any] = {
        "rack": 0, "racks": 1 + len(peers), "job": "j", "address": "tcp://a:21900",
        "lane": "a:22000",
        "heartbeat_ms": 100, "detect_ms": 2000.0, "seconds": 3.0, "turns_done": True,
        "versions": VERSIONS, "facts": FACTS, "wishes": {"sideband_heartbeat_ms": "100"},
        "peers": peers,
    }  # fmt: skip
    return Meeting(**{**usual, **more})


def kinds(found: list[Finding]) -> set[str]:
    return {each.severity for each in found}


def the(severity: str, found: list[Finding]) -> Finding:
    """The only one of that kind."""
    (one,) = [each for each in found if each.severity == severity]
    return one


def test_all_is_well() -> None:
    found = of_meeting(seen_from_rack_0(GOOD, replace(GOOD, rack=2)))
    assert kinds(found) == {"ok"}
    text = "\n".join(map(str, found))
    assert "all 3 racks met in 3.0 s" in text
    assert "round trip 1.00 ms, p99 2.00 ms (50 pings)" in text
    assert "rack 1 to rack 0: 940 Mbit/s in 64 MB" in text
    assert "rack 0 to rack 2: 930 Mbit/s" in text


ABSENT = Seen(rack=1, address="tcp://b:21901")


@pytest.mark.parametrize(
    ("seen", "found", "change"),
    [
        (
            replace(ABSENT, answer="refused"),
            "Rack 1 did not come: tcp://b:21901 refused",
            "Start `mend doctor --meet`",
        ),
        (replace(ABSENT, answer="silent"), "neither yes nor no", "A firewall drops"),
        (replace(ABSENT, answer="no route"), "no route", "Check the address"),
        (replace(ABSENT, answer="no such name"), "nothing here knows", "Correct the name"),
        (replace(ABSENT, answer="open"), "What listens at tcp://b:21901 is not mend", "Another"),
        (
            replace(ABSENT, answer="open", speaks=True),
            "but no doctor of rack 1 was heard",
            "check entry 0 of MEND_SIDEBAND_PEERS there",
        ),
        (
            replace(ABSENT, heard_by=(2, 3), answer="silent"),
            "Rack 1 runs (heard by rack 2, 3), but nothing of it arrives here",
            "the way from rack 1 to tcp://a:21900",
        ),
        (
            replace(GOOD, hears_us=False, answer="silent"),
            "One direction fails: rack 1 is heard here, but nothing from here reaches it",
            "A firewall drops",
        ),
        (ABSENT, "was not tried", "Compare MEND_SIDEBAND_PEERS"),
    ],
)
def test_a_rack_that_does_not_come(seen: Seen, found: str, change: str) -> None:
    problem = the("problem", of_meeting(seen_from_rack_0(seen)))
    assert problem.topic == "rack 1"
    assert found in problem.found
    assert change in problem.change


def test_another_job_beats_every_other_reason() -> None:
    seen = replace(ABSENT, answer="open", speaks=True)
    problem = the("problem", of_meeting(seen_from_rack_0(seen, strangers=((1, "k"),))))
    assert "job id 'k'; this rack has 'j'" in problem.found
    assert "MEND_JOB_ID" in problem.change


def test_who_does_not_belong() -> None:
    meeting = seen_from_rack_0(
        GOOD, strangers=((7, "j"),), jobs=((0xFFFF, "t"), (1, "t")), doubles=(1,), garbage=3
    )
    text = "\n".join(str(each) for each in of_meeting(meeting) if each.severity != "ok")
    for part in (
        "Rack 7 of this job came, but there are only 2 here",
        "A job is running: the witness of job 't'",
        "A job is running: rack 1 of job 't'",
        "Two processes say that they are rack 1",
        "3 frames came that are neither",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("answer", "speaks", "severity", "part"),
    [
        ("open", True, "ok", "answers"),
        ("open", False, "problem", "is no witness"),
        ("refused", False, "note", "Start `mend coordinate`"),
        ("silent", False, "problem", "A firewall drops"),
        ("", False, "problem", "not tried"),
    ],
)
def test_the_witness(answer: str, speaks: bool, severity: str, part: str) -> None:
    found = of_meeting(seen_from_rack_0(GOOD, witness=("tcp://w:21899", answer, speaks)))
    (told,) = [each for each in found if each.topic == "witness"]
    assert told.severity == severity
    assert part in str(told)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tau", "Set MEND_OVERLAP_STEPS alike"),
        ("codec", "Set MEND_OUTER_STEP_COMPRESSION_MODE or MEND_PAYLOAD_DTYPE alike"),
        ("ramp_rounds", "Set MEND_OUTER_RAMP_ROUNDS or MEND_OUTER_START alike"),
        ("sync_period_steps", "Set MEND_SYNC_PERIOD_STEPS alike"),
        ("mend version", "Run the same mend"),
    ],
)
def test_settings_that_must_be_equal(name: str, change: str) -> None:
    other = replace(GOOD, facts={**FACTS, name: "9"})
    problem = the("problem", of_meeting(seen_from_rack_0(other)))
    assert problem.found == f"{name} is {FACTS[name]} here and 9 on rack 1."
    assert change in problem.change


def test_what_is_not_known_does_not_differ() -> None:
    other = replace(GOOD, facts={**FACTS, "ranks per rack": "8"})
    assert kinds(of_meeting(seen_from_rack_0(other))) == {"ok"}
    known = seen_from_rack_0(other, facts={**FACTS, "ranks per rack": "4"})
    assert "ranks per rack is 4 here and 8" in the("problem", of_meeting(known)).found


def test_what_had_better_be_equal_is_a_note() -> None:
    other = replace(
        GOOD, wishes={"sideband_heartbeat_ms": "50"}, versions={**VERSIONS, "torch": "2.8"}
    )
    found = [each for each in of_meeting(seen_from_rack_0(other)) if each.severity != "ok"]
    assert [each.severity for each in found] == ["note", "note"]
    assert "MEND_SIDEBAND_HEARTBEAT_MS" in found[0].change
    assert "torch is 2.9 here and 2.8 on rack 1." in found[1].found


# ------------------------------------------------------------------ how long, how much


def test_a_round_trip_that_is_long_for_the_heartbeats() -> None:
    note = the("note", of_meeting(seen_from_rack_0(replace(GOOD, p99_ms=800.0))))
    assert "taken for silent after 2000 ms" in note.found
    assert note.change == "Set MEND_SIDEBAND_HEARTBEAT_MS=200 on all racks."


def test_pings_without_an_answer() -> None:
    note = the("note", of_meeting(seen_from_rack_0(replace(GOOD, trips=60, asked=100))))
    assert "40 % of the pings" in note.found
    silent = replace(GOOD, trips=0, p50_ms=None, p99_ms=None, clock_ms=None)
    note = the("note", of_meeting(seen_from_rack_0(silent)))
    assert "No ping to rack 1 was answered" in note.found


def test_clocks_far_apart_are_a_note_as_nothing_is_decided_by_them() -> None:
    note = the("note", of_meeting(seen_from_rack_0(replace(GOOD, clock_ms=-61_000.0))))
    assert "-61.0 s off ours" in note.found
    assert "chrony" in note.change


@pytest.mark.parametrize(("way", "sink", "source"), [("here", 0, 1), ("there", 1, 0)])
def test_a_lane_that_fails_names_the_direction(way: str, sink: int, source: int) -> None:
    failed: dict[str, Any] = {way: Flow(error="holder b:22000: timed out")}
    problem = the("problem", of_meeting(seen_from_rack_0(replace(GOOD, **failed))))
    told = f"Rack {sink} cannot pull from rack {source}: holder b:22000: timed out."
    assert problem.found == told
    assert f"Set MEND_DATA_PORTS on rack {source}" in problem.change


def test_an_advertised_loopback_address() -> None:
    lost = replace(GOOD, lane="127.0.0.1:22000")
    problem = the("problem", of_meeting(seen_from_rack_0(lost)))
    assert "Set MEND_ADVERTISE_HOST on rack 1" in problem.change
    here = of_meeting(seen_from_rack_0(replace(lost, same_machine=True)))
    assert kinds(here) == {"ok"}


def test_one_slow_direction() -> None:
    note = the("note", of_meeting(seen_from_rack_0(replace(GOOD, there=Flow(100.0, 25.0)))))
    assert "9.4 times as fast" in note.found
    assert "TcpRetransSegs" in note.change


def test_turns_that_did_not_end() -> None:
    unmeasured = replace(GOOD, here=None, there=None, together=None)
    note = the("note", of_meeting(seen_from_rack_0(unmeasured, turns_done=False)))
    assert "was not measured" in note.found
    wanted = of_meeting(seen_from_rack_0(unmeasured))
    assert kinds(wanted) == {"ok"}, "--bandwidth 0"


def test_socket_buffers_on_a_long_link() -> None:
    """4 connections of 1 MB windows carry 320 Mbit/s over 100 ms; 300 came."""
    far = replace(GOOD, p50_ms=100.0, p99_ms=110.0, here=Flow(300.0), there=Flow(290.0))
    meeting = seen_from_rack_0(far, buffers=(2_000_000, 4_000_000))
    note = the("note", of_meeting(meeting))
    assert "320 Mbit/s" in note.found
    assert "net.ipv4.tcp_rmem" in note.change
    wanted = int(note.change.split(" to ")[1].split(" ")[0])
    assert wanted > 2_000_000, "more than there is"
    assert kinds(of_meeting(replace(meeting, buffers=(32 << 20, 32 << 20)))) == {"ok"}
    assert window_mbit((1, 1), WINDOW_MS_MIN / 2) is None
    assert window_mbit(None, 100.0) is None


def test_sums_over_the_racks() -> None:
    meeting = seen_from_rack_0(GOOD, replace(GOOD, rack=2, p50_ms=7.0))
    assert meeting.inbound_mbit == 1800.0
    assert meeting.slowest_trip_ms == 7.0
    lame = seen_from_rack_0(GOOD, replace(GOOD, rack=2, together=None))
    assert lame.inbound_mbit is None, "half of a sum is no sum"
    assert rate(12_340.0) == "12.34 Gbit/s"
    assert rate(12.34) == "12.3 Mbit/s"


def test_a_job_of_one_rack_meets_nobody() -> None:
    note = the("note", of_meeting(seen_from_rack_0()))
    assert "nobody to meet" in note.found


def test_some_met() -> None:
    found = of_meeting(seen_from_rack_0(GOOD, replace(ABSENT, rack=2, answer="refused")))
    assert "met 1 of 2 racks: 1" in the("note", found).found
    assert the("problem", found).topic == "rack 2"
