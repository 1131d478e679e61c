"""From settings to a meeting, and from what was heard to plain data."""

from __future__ import annotations

from typing import Any

import pytest

from mend.config import MendConfig
from mend.errors import ConfigError
from mend.tools.doctor.local import System
from mend.tools.doctor.meet import about_of, meeting_of, rules_of
from mend.tools.doctor.meeting import MeetingResult
from mend.tools.doctor.meeting_messages import Envelope, Pong, Pull, encode
from mend.tools.doctor.meeting_state import MeetingState
from mend.tools.doctor.terms import Flow
from mend.transport.probe import Knock
from mend.types import MS, SECOND, Address
from tests.unit.tools.test_doctor_meeting_messages import HERE
from tests.unit.tools.test_doctor_meeting_state import Room

PEERS = ("tcp://a:1", "tcp://b:2", "tcp://c:3")


def config(**given: Any) -> MendConfig:
    return MendConfig(**{"rack": 0, "racks": 3, "sideband_peers": PEERS, **given})


def test_the_rules_of_a_meeting() -> None:
    rules = rules_of(config(job_id="x"), 30.0, 2.0)
    assert (rules.job, rules.rack, rules.racks) == ("x", 0, 3)
    assert (rules.wait_ns, rules.pull_ns) == (30 * SECOND, 2 * SECOND)
    many = rules_of(MendConfig(rack=0, racks=64), 30.0, 2.0)
    assert 0 < many.pull_ns < SECOND // 2, "many turns are short ones"
    with pytest.raises(ConfigError, match="nothing says which rack this is"):
        rules_of(config(rack=None), 30.0, 2.0)


def test_what_a_doctor_says_of_itself_has_no_control_characters_and_ends() -> None:
    names = tuple(f"layer{number}*" for number in range(500))
    versions = {"python": "3.11\x1b[2J", "mend": "9"}
    about = about_of(config(merge_mean_names=names), versions, 8)
    facts = dict(about.facts)
    assert facts["tau"] == "8"
    assert facts["ranks per rack"] == "8"
    assert facts["witness"] == "none"
    assert len(facts["merge_mean_names"]) < 300
    other = dict(about_of(config(merge_mean_names=names[:-1]), versions, None).facts)
    assert other["merge_mean_names"] != facts["merge_mean_names"], "the digest is of the whole"
    assert other["ranks per rack"] == ""
    assert dict(about.versions) == {"python": "3.11 [2J"}
    assert encode(Envelope("j", 0, 1, HERE))


def state_that_heard_rack_1() -> MeetingState:
    """Of three racks; rack 1 hears everybody, rack 2 does not come."""
    room = Room(3, present=(0, 1)).run(60 * SECOND)
    state = room.states[0]
    there = state.others[1].here
    assert there is not None
    return state


def test_what_was_heard_becomes_plain_data() -> None:
    state = state_that_heard_rack_1()
    met = MeetingResult(state, state.begun_ns + 9 * SECOND, Address("a", 5))
    met.knocks = {2: Knock("refused", False, "no"), None: Knock("open", True)}
    met.ever_open = {1, None}
    about = about_of(config(), {}, None)
    meeting = meeting_of(met, config(witness_addr="tcp://w:9"), about, System())
    assert (meeting.rack, meeting.racks, meeting.seconds) == (0, 3, 9.0)
    assert meeting.address == "tcp://a:1"
    assert meeting.witness == ("tcp://w:9", "open", True)
    here, absent = meeting.peers
    assert (here.heard, here.hears_us, here.answer) == (True, True, "open")
    assert here.trips >= 50
    assert here.p50_ms == pytest.approx(10, abs=6)
    assert here.clock_ms == pytest.approx(1000, abs=6)
    assert here.here == Flow(8 * 8e3 / 9, 8e-6)
    assert here.there == here.here
    assert here.together == here.here
    assert (absent.heard, absent.answer, absent.detail) == (False, "refused", "no")
    assert absent.here is None
    assert meeting.inbound_mbit is None, "nobody knows what rack 2 adds"


def test_a_pull_that_failed_has_no_rate() -> None:
    state = state_that_heard_rack_1()
    state.pulls = [Pull(1, 1, False, 0, 0, "timed out"), Pull(2, 1, True, 0, 0, "")]
    met = MeetingResult(state, state.begun_ns, Address("a", 5))
    seen = meeting_of(met, config(), about_of(config(), {}, None), System()).peers[0]
    assert seen.here == Flow(error="timed out")
    assert seen.together == Flow(error="nothing came")


def test_a_pong_alone_makes_no_peer() -> None:
    """Who sent no state is nobody that one has met."""
    state = Room(3, present=(0,)).states[0]
    state.hear(encode(Envelope("job", 1, 9, Pong(1, 2, 3))), 5 * MS, 0)
    met = MeetingResult(state, state.begun_ns, Address("a", 5))
    seen = meeting_of(met, config(), about_of(config(), {}, None), System()).peers[0]
    assert not seen.heard
