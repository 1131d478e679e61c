"""What a meeting means: what was seen in, findings out, each with what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mend.tools.doctor.findings import WINDOW_MS_MIN, of_meeting, window_mbit
from mend.tools.doctor.terms import Finding, Meeting, Seen, rate

SETTINGS = {"sideband_heartbeat_ms": 100.0, "witness": 0.0}

GOOD = Seen(
    rack=1, address="tcp://b:21901", answer="open", speaks=True, job="j-doctor", hello=True,
    settings=SETTINGS, tried=50, trips=50, p50_ms=1.0, p99_ms=2.0, clock_ms=0.5, mbit=940.0,
    megabytes=16.0,
)  # fmt: skip
ABSENT = Seen(rack=1, address="tcp://b:21901")


def seen_from_rack_0(*peers: Seen, **more: Any) -> Meeting:
    usual: dict[str, Any] = {
        "rack": 0, "racks": 1 + len(peers), "job": "j-doctor", "address": "tcp://a:21900",
        "heartbeat_ms": 100, "detect_ms": 2000.0, "seconds": 3.0, "settings": SETTINGS,
        "peers": peers, "megabytes": 16.0,
    }  # fmt: skip
    return Meeting(**{**usual, **more})


def not_begun(seen: Seen, **more: Any) -> Finding:
    """What is said of the one other rack when the start timed out."""
    meeting = seen_from_rack_0(seen, failure="StartTimeout: after 30 s", timed_out=True, **more)
    first, *rest = of_meeting(meeting)
    assert (first.severity, first.topic) == ("problem", "meeting")
    assert "did not begin: StartTimeout: after 30 s." in first.found
    return next(each for each in rest if each.topic == "rack 1")


def the(severity: str, found: list[Finding]) -> Finding:
    """The only one of that kind."""
    (one,) = [each for each in found if each.severity == severity]
    return one


def test_racks_that_met_are_told_rates_and_round_trips() -> None:
    found = of_meeting(seen_from_rack_0(GOOD, replace(GOOD, rack=2)))
    assert {each.severity for each in found} == {"ok"}
    text = "\n".join(map(str, found))
    assert "all 3 racks began together, exchanged and ended in 3.0 s" in text
    assert "round trip 1.00 ms, p99 2.00 ms (50 connections)" in text
    assert "rack 1 to rack 0: 940 Mbit/s in 16 MB" in text
    assert "within a second" in text


@pytest.mark.parametrize(
    ("seen", "found", "change"),
    [
        (
            replace(ABSENT, answer="refused", detail="no"),
            "Rack 1 did not come: tcp://b:21901 refused the connection: no.",
            "Start `mend doctor --meet`",
        ),
        (replace(ABSENT, answer="silent"), "neither yes nor no", "A firewall drops"),
        (replace(ABSENT, answer="no route"), "no route", "Check the address"),
        (replace(ABSENT, answer="no such name"), "nothing here knows", "Correct the name"),
        (replace(ABSENT, answer="open"), "What listens at tcp://b:21901 is not mend", "entry 1"),
        (replace(ABSENT, answer="open", speaks=True), "answers no look", "observe=false"),
        (replace(ABSENT, answer="open", locked=True), "another key", "sha256sum"),
        (replace(ABSENT, answer="open", job="k"), "Job 'k' is running", "stop it first"),
        (
            replace(ABSENT, answer="open", job="k-doctor"),
            "came with job id 'k'; this rack has 'j'",
            "the same MEND_JOB_ID",
        ),
        (
            replace(ABSENT, hello=True, answer="silent"),
            "One direction fails: rack 1 is heard here, but nothing from here reaches it",
            "A firewall drops",
        ),
        (
            replace(ABSENT, answer="open", job="j-doctor"),
            "is reached from here, but nothing of it arrives at tcp://a:21900",
            "its entry 0 of MEND_SIDEBAND_PEERS",
        ),
    ],
)
def test_a_rack_that_does_not_come_is_named_with_its_cause(
    seen: Seen, found: str, change: str
) -> None:
    told = not_begun(seen)
    assert told.severity == "problem"
    assert found in told.found
    assert change in told.change


def test_an_answer_that_does_not_arrive_names_the_direction() -> None:
    founder = replace(GOOD, rack=0, hello=False)
    meeting = seen_from_rack_0(founder, rack=1, failure="x", timed_out=True, answered=False)
    told = next(each for each in of_meeting(meeting) if each.topic == "rack 0")
    assert "its answer does not arrive at tcp://a:21900" in told.found
    assert "entry 1 of MEND_SIDEBAND_PEERS on rack 0" in told.change
    both = replace(meeting, answered=True, peers=(replace(founder, waits="no answer yet"),))
    assert any("waits as well: no answer yet" in each.found for each in of_meeting(both))


def test_a_rack_that_was_refused_is_named_with_both_values() -> None:
    told = not_begun(replace(GOOD, refused="outer_lr is 1.0 there and 0.5 here"))
    assert told.found == "outer_lr is 1.0 there and 0.5 here."
    refused = of_meeting(seen_from_rack_0(GOOD, failure="PlanMismatch: outer_lr"))
    assert the("problem", refused).topic == "meeting", "the error has said it all"


def test_an_exchange_that_fails_names_the_direction() -> None:
    lame = replace(GOOD, mbit=None, error="holder b:22000: timed out. Check that it runs.")
    found = of_meeting(seen_from_rack_0(lame, outcome="kept-local (why)"))
    whole, lane = [each for each in found if each.severity == "problem"]
    assert "this one ended kept-local" in whole.found
    assert "Rack 0 cannot pull from rack 1: holder b:22000: timed out." in lane.found
    assert "Set MEND_DATA_PORTS on rack 1" in lane.change


@pytest.mark.parametrize(
    ("answer", "speaks", "severity", "part"),
    [
        ("open", True, "ok", "answers"),
        ("open", False, "problem", "is not a witness"),
        ("refused", False, "note", "Start `mend coordinate`"),
        ("silent", False, "problem", "A firewall drops"),
        ("", False, "problem", "not tried"),
    ],
)
def test_the_port_of_the_witness_is_judged(
    answer: str, speaks: bool, severity: str, part: str
) -> None:
    witness = Seen(0xFFFF, "tcp://w:21899", answer, speaks=speaks)
    found = of_meeting(seen_from_rack_0(GOOD, witness=witness))
    (told,) = [each for each in found if each.topic == "witness"]
    assert told.severity == severity
    assert part in str(told)


def test_settings_that_should_be_equal_are_notes_and_a_missing_witness_is_a_problem() -> None:
    other = replace(GOOD, settings={"sideband_heartbeat_ms": 50.0, "witness": 1.0})
    found = [each for each in of_meeting(seen_from_rack_0(other)) if each.severity != "ok"]
    assert [each.severity for each in found] == ["note", "problem"]
    assert "sideband_heartbeat_ms is 100 here and 50 on rack 1." in found[0].found
    assert "Rack 1 has a witness, and the other one has none." in found[1].found
    assert "MEND_WITNESS_ADDR" in found[1].change


# ------------------------------------------------------------------ how long, how much


@pytest.mark.parametrize(
    ("seen", "found", "change"),
    [
        ({"p99_ms": 800.0}, "taken for silent after 2000 ms",
         "Set MEND_SIDEBAND_HEARTBEAT_MS=200 on all racks."),
        ({"trips": 30}, "40 % of the connections", ""),
        ({"clock_ms": -61_000.0}, "-61.0 s off ours", "chrony"),
    ],
)  # fmt: skip
def test_long_round_trip_lost_connections_and_clocks_far_apart_are_notes(
    seen: dict[str, Any], found: str, change: str
) -> None:
    note = the("note", of_meeting(seen_from_rack_0(replace(GOOD, **seen))))
    assert found in note.found
    assert change in note.change


def test_nothing_is_said_of_what_was_not_measured() -> None:
    blind = Seen(rack=1, address="tcp://b:1")  # behind a proxy, --megabytes 0
    (told,) = of_meeting(seen_from_rack_0(blind, megabytes=0.0))
    assert (told.severity, told.topic) == ("ok", "meeting")


@pytest.mark.parametrize("error", ["", "holder b:22000: refused."])
def test_a_rack_that_merged_alone_has_met_nobody(error: str) -> None:
    """Its own end was good, and it said that all racks had exchanged."""
    alone = replace(GOOD, rack=2, mbit=None, error=error)
    found = [each for each in of_meeting(seen_from_rack_0(GOOD, alone)) if each.severity != "ok"]
    assert {each.severity for each in found} == {"problem"}
    assert "nothing was pulled from 2." in found[0].found
    assert len(found) == (2 if error else 1)


def test_socket_buffers_on_a_long_link_are_a_note() -> None:
    """4 connections of 1 MB windows carry 320 Mbit/s over 100 ms; 300 came."""
    far = replace(GOOD, p50_ms=100.0, p99_ms=110.0, mbit=300.0)
    meeting = seen_from_rack_0(far, buffers=(2_000_000, 4_000_000))
    note = the("note", of_meeting(meeting))
    assert "320 Mbit/s" in note.found
    wanted = int(note.change.split(" to ")[1].split(" ")[0])
    assert wanted > 2_000_000, "more than there is"
    large = of_meeting(replace(meeting, buffers=(32 << 20, 32 << 20)))
    assert {each.severity for each in large} == {"ok"}
    assert window_mbit((1, 1), WINDOW_MS_MIN / 2) is None
    assert window_mbit(None, 100.0) is None


def test_the_slowest_round_trip_counts() -> None:
    meeting = seen_from_rack_0(GOOD, replace(GOOD, rack=2, p50_ms=7.0))
    assert meeting.slowest_trip_ms == 7.0
    assert seen_from_rack_0(ABSENT).slowest_trip_ms is None
    assert rate(12_340.0) == "12.34 Gbit/s"
    assert rate(12.34) == "12.3 Mbit/s"
