"""A script: what tapes say that must be done again, and no more than they have everything for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mend.consensus.records import Ballot, Drop, Ended, Record
from mend.coordination import events as ev
from mend.coordination.machines import RANK_MACHINE, ProcessSpec
from mend.errors import TapeError
from mend.trace.format import Entry, Gap, Header, answer_of
from mend.types import Peer
from mend_lab.replay.script import (
    Act,
    GivenState,
    Recital,
    ReplayScript,
    decode_script,
    encode_script,
    recite,
    script_of,
)
from tests.unit.coordination.nouns import (
    commit,
    digest,
    genesis,
    lineage,
    log_of,
    member,
    offer,
    roster,
)

FIRST = genesis()


def entry(event: ev.Event, *effects: ev.Effect, machine: str = RANK_MACHINE) -> Entry:
    return Entry(1, machine, 0, event, tuple(answer_of(effect) for effect in effects))


def tape(
    rack: int,
    events: Sequence[ev.Event] = (),
    log: Sequence[Record] = (FIRST,),
    *,
    whole: bool = True,
    life: int = 0,
    rank: int = 0,
    job: str = "job",
) -> Recital:
    """Of a rack that heard of `log` first, and whose training thread then did `events`."""
    header = Header(
        job=job, rack=rack, rank=rank, parts=ProcessSpec(Peer(rack, rank), member(rack, life))
    )
    heard = entry(ev.Tick(), *(ev.RecordCommitted(record) for record in log))
    return recite(header, whole, [heard, *(entry(event) for event in events)])


def captured(step: int, seq: int, fragment: int = 0) -> list[ev.Event]:
    return [ev.Captured(fragment, seq, 0, step, 10, 2), ev.Encoded(fragment, seq, f"{seq:032x}")]


LOG = (FIRST, commit(1, [offer(0)]), commit(2, [offer(1)]), commit(3, [offer(0, 2)]))
MINE = [
    *captured(8, 1), ev.Applied(0, 1, 1, 10), *captured(16, 2), ev.Applied(0, 3, 2, 18),
    ev.Leaving(),
]  # fmt: skip
THEIRS = [*captured(8, 1), ev.Applied(0, 2, 1, 10), ev.Applied(0, 3, 0, 18), ev.Leaving()]


def versions(script: ReplayScript) -> list[tuple[int, int]]:
    return list(script.commits)


def acts(script: ReplayScript, rack: int) -> list[tuple[str, int]]:
    part = script.part(rack)
    assert part is not None
    return [(act.kind, act.number) for act in part.acts[0]]


def test_a_rack_that_was_evicted_did_not_end_its_script() -> None:
    """It leaves in the middle of it, at once; one that is late at its end has said so before."""
    for last, ends in (([ev.Leaving(now=True)], False), ([ev.Leaving(), ev.Leaving(True)], True)):
        script = script_of([tape(0, MINE, LOG), tape(1, [*THEIRS[:-1], *last], LOG)])
        part = script.part(1)
        assert part is not None
        assert part.ends == ends


def test_acts_of_training_are_read_in_order_with_their_checksums() -> None:
    script = script_of([tape(0, MINE, LOG), tape(1, THEIRS, LOG)])
    assert (script.rounds, versions(script), script.omitted) == (3, [(0, 1), (0, 2), (0, 3)], ())
    part = script.part(0)
    assert part is not None
    assert part.ends
    assert part.acts == (
        (
            Act("captured", 8, 0, 1, 0, 10, 2, f"{1:032x}"),
            Act("applied", 10, 0, 1),
            Act("captured", 16, 0, 2, 0, 10, 2, f"{2:032x}"),
            Act("applied", 18, 0, 3),
        ),
    )
    assert decode_script(encode_script(script)) == script
    assert script.part(2) is None


def test_the_longest_log_counts_and_take_overs_do_not() -> None:
    """Who coordinated, and who had a seat, changes no bit."""
    longer = (*LOG[:2], roster(1, [0, 1]), Ballot(9), *LOG[2:])
    script = script_of([tape(0, MINE, longer), tape(1, THEIRS, longer[:2])])
    assert [type(record).__name__ for record in script.records] == ["Commit"] * 3


def test_rounds_end_where_a_killed_rack_has_lost_its_end() -> None:
    """Its last capture was named, but did not get to the disk."""
    script = script_of([tape(0, MINE[:3], LOG[:2], whole=False), tape(1, THEIRS, LOG)])
    assert versions(script) == [(0, 1), (0, 2)]
    assert acts(script, 1) == [("captured", 1), ("applied", 2)], "version 3 will never be"
    assert script.omitted == (
        "everything after round 2 is left out: the tape of rack 0 does not reach what it names",
        "rack 0 is replayed up to step 10",
        "rack 1 is replayed up to step 10",
    )
    part = script.part(1)
    assert part is not None
    assert not part.ends


def test_script_cut_for_one_rack_is_cut_for_another() -> None:
    """Rack 1 captured its second offer behind a version that is not replayed."""
    theirs = [*captured(8, 1), ev.Applied(0, 3, 1, 18), *captured(24, 2), ev.Leaving()]
    log = (*LOG, commit(4, [offer(1, 2)]))
    script = script_of([tape(0, MINE[:3], log, whole=False), tape(1, theirs, log)])
    assert versions(script) == [(0, 1), (0, 2)]
    assert acts(script, 1) == [("captured", 1)]


def test_how_many_micro_batches_a_rack_took_from_which_step_on_is_read() -> None:
    mine = [*MINE[:3], ev.BatchSet(10, 50), *MINE[3:5], ev.BatchSet(18, 100), *MINE[5:]]
    script = script_of([tape(0, mine, LOG), tape(1, THEIRS, LOG)])
    assert [part.batches for part in script.parts] == [((10, 50), (18, 100)), ()]
    assert acts(script, 0) == acts(script_of([tape(0, MINE, LOG), tape(1, THEIRS, LOG)]), 0)


BACK = roster(1, [0, 1], lives={1: 1})
"""Rack 1 is started again."""

STATE = "5" * 32
AGAIN: list[ev.Event] = [
    ev.Applied(0, 1, 0), ev.StateCopied(member(0), 12, STATE), ev.Wanting(False),
    ev.StepReached(12, 0), *captured(24, 1), ev.Applied(0, 3, 1, 26), ev.Leaving(),
]  # fmt: skip
"""Of the new life: it begins with version 1, and goes on from rack 0's step 12."""

GAVE = ev.StateTaken(member(1, 1), 12, 100, STATE)
LATER = (*LOG[:3], BACK, commit(3, [offer(1, 1, life=1)]))


def rejoined(
    donor: Sequence[ev.Event] = (*MINE[:5], GAVE, *MINE[5:]), again: Sequence[ev.Event] = AGAIN
) -> ReplayScript:
    return script_of(
        [
            tape(0, donor, LATER),
            tape(1, THEIRS[:3], LATER[:3], whole=False),
            tape(1, again, LATER, life=1),
        ]
    )


def test_a_later_life_is_a_rack_of_its_own() -> None:
    """It takes the place behind the life before it, so that members of a merge still ascend."""
    script = rejoined()
    assert [(part.title, part.first) for part in script.parts] == [
        ("rack 0", ()), ("rack 1", ()), ("rack 1 (life 2)", (1,)),
    ]  # fmt: skip
    assert versions(script) == [(0, 1), (0, 2), (0, 3)]
    _, last = script.commits[0, 3]
    assert [share.member.rack for share in last.members] == [2]
    assert acts(script, 2) == [("applied", 1), ("captured", 1), ("applied", 3)]
    assert script.given == (GivenState(0, 2, 0, 12, (STATE,)),)
    assert script.omitted == ("rack 1 is replayed up to step 10",)
    assert decode_script(encode_script(script)) == script


MIRRORED = ev.RackStateLoaded(member(1), 8, "6" * 32)
"""The new life of rack 1 has what its former life had of its own behind its capture of step 8."""


def test_a_later_life_goes_on_at_its_own_place_of_a_former_one() -> None:
    script = rejoined(again=[AGAIN[0], MIRRORED, *AGAIN[1:]])
    assert script.mirrors == (GivenState(1, 2, 1, 8, ("6" * 32,)),)
    assert len(script.parts) == 3


def test_a_later_life_whose_former_one_is_not_replayed_so_far_is_left_out() -> None:
    later = ev.RackStateLoaded(member(1), 24, "6" * 32)
    script = rejoined(again=[AGAIN[0], later, *AGAIN[1:]])
    why = "rack 1 is not replayed up to step 24, which it went on from"
    assert f"rack 1 (life 2) joined later and is left out: {why}" in script.omitted


def test_a_later_life_that_began_with_nothing_of_a_donor() -> None:
    """It pulled a copy, and its ranks could not agree on it."""
    fresh = [*AGAIN[:3], ev.StepReached(12, 7_000_000), *AGAIN[4:]]
    script = rejoined(again=fresh)
    assert script.given == ()
    assert len(script.parts) == 3


@pytest.mark.parametrize(
    ("donor", "again", "why"),
    [
        (MINE, AGAIN, "no tape has the state that rack 0 gave it"),
        ([*MINE[:2], ev.Applied(0, 9, 0, 11), GAVE], AGAIN,
         "rack 0 is not replayed up to step 12, which it went on from"),
        (MINE, [ev.Applied(0, 4, 0), *AGAIN[4:]], "it began with a version that is not replayed"),
    ],
)  # fmt: skip
def test_a_later_life_whose_beginning_is_not_there_is_left_out(
    donor: list[ev.Event], again: list[ev.Event], why: str
) -> None:
    """With all that builds on it."""
    script = rejoined(donor, again)
    assert len(script.parts) == 2
    assert f"rack 1 (life 2) joined later and is left out: {why}" in script.omitted
    assert (0, 3) not in versions(script)


def test_a_later_life_without_tapes_is_told() -> None:
    script = script_of([tape(0, MINE, LATER), tape(1, THEIRS[:3], LATER[:3], whole=False)])
    assert versions(script) == [(0, 1), (0, 2)]
    assert script.omitted[0] == (
        "rack 1 (life 2) joined later and is left out: not all of its tapes are here"
    )
    assert "it names rack 1 in a life that is left out" in script.omitted[1]


def test_a_log_that_begins_with_a_snapshot_is_put_in_its_place() -> None:
    """Of a life that joined late: the records before it are on other tapes only."""
    log = log_of(*LATER[:3])
    log.decide(log.last)
    header = Header(job="job", rack=1, rank=0, parts=ProcessSpec(Peer(1, 0), member(1, 1)))
    behind = [ev.Restored(log.snapshot()), *map(ev.RecordCommitted, LATER[3:])]
    mine = tape(0, [*MINE[:5], GAVE, *MINE[5:]], LATER)
    first = tape(1, THEIRS[:3], LATER[:3], whole=False)
    last = recite(header, True, [entry(ev.Tick(), *behind), *map(entry, AGAIN)])
    assert len(versions(script_of([mine, first, last]))) == 3
    other = [behind[0], ev.RecordCommitted(Ballot(77)), *behind[2:]]
    last = recite(header, True, [entry(ev.Tick(), *other), *map(entry, AGAIN)])
    with pytest.raises(TapeError, match="of another job than the others: record 4"):
        script_of([mine, first, last])


def test_a_new_lineage_ends_it_where_the_logs_part() -> None:
    """What only the dead rack knew to be decided is not replayed, though its tape has it."""
    others = (*LOG[:3], lineage(9, [0], [1], [2]), commit(3, [offer(0, 3)]))
    for first, second in ((others, LOG), (LOG, others)):
        script = script_of([tape(0, MINE, first), tape(1, THEIRS, second)])
        assert versions(script) == [(0, 1), (0, 2)]
        assert "a Lineage record came then" in script.omitted[0]


def test_a_discard_needs_its_reason() -> None:
    """It was declined by its own rack, or the log drops it."""
    forgot: list[ev.Event] = [*captured(8, 1), ev.Discarded(0, 1, 10), ev.Leaving()]
    declined: list[ev.Event] = [
        ev.Captured(0, 1, 0, 8, 10, 2), ev.Encoded(0, 1, "", "not finite"), *forgot[2:],
    ]  # fmt: skip
    drop = Drop(0, (Ended(member(0), 1),), "too old")
    for events, log, kept in (
        (forgot, (FIRST, drop), 2),
        (declined, (FIRST,), 2),
        (forgot, (FIRST,), 1),
    ):
        script = script_of([tape(0, events, log), tape(1, [], log)])
        assert len(acts(script, 0)) == kept, events


def test_ranks_of_a_rack_go_as_far_as_the_shortest_tape() -> None:
    first = genesis(ranks=2)
    log = (first, commit(1, [offer(0, ranks=2)], ranks=2))
    tapes = [tape(rack, MINE[:3], log, rank=rank) for rack in (0, 1) for rank in (0, 1)]
    tapes[3] = tape(1, MINE[:2], log, rank=1, whole=False)
    script = script_of(tapes)
    part = script.part(1)
    assert part is not None
    assert [len(each) for each in part.acts] == [1, 1]
    tapes[3] = tape(1, captured(9, 1), log, rank=1)
    with pytest.raises(TapeError, match="the ranks of rack 1 did not act together"):
        script_of(tapes)


def test_digests_of_tensors_are_kept_where_they_are_of_the_decided_bits() -> None:
    right = ev.Merged(0, 1, 1, digest(1000), tensors=b"12345678")
    wrong = ev.Merged(0, 1, 1, digest(7), tensors=b"abcdefgh")
    script = script_of([tape(0, [*MINE, wrong], LOG), tape(1, [*THEIRS, right], LOG)])
    assert [(s.fragment, s.version, s.rank, s.digests) for s in script.sums] == [
        (0, 1, 0, b"12345678")
    ]


def test_acts_behind_a_gap_are_ignored() -> None:
    header = Header(job="job", rack=0, rank=0, parts=ProcessSpec(Peer(0, 0), member(0)))
    entries: list[Entry | Gap] = [entry(MINE[0]), Gap(3, "slow"), entry(MINE[3])]
    found = recite(header, True, entries)
    assert len(found.acts) == 1
    assert not found.whole
    other = entry(MINE[0], machine="leader")
    assert recite(header, True, [other]).acts == []


@pytest.mark.parametrize(
    ("tapes", "why"),
    [
        ([tape(0, [], ())], "no job has begun"),
        ([tape(0)], "no tape of rack 1 rank 0"),
        ([tape(0, [], LOG), tape(1, [], (FIRST, LOG[2]))], "of another"),
    ],
)
def test_tapes_that_make_no_script_are_refused(tapes: list[Recital], why: str) -> None:
    with pytest.raises(TapeError, match=why):
        script_of(tapes)


def test_bytes_that_are_no_script_are_refused() -> None:
    for data in (b"", b"\x00", b"\x81\xa1a\x01"):
        with pytest.raises(TapeError, match="not a script"):
            decode_script(data)


def test_an_encoding_of_what_is_not_on_the_tape_is_passed_over() -> None:
    lone = tape(0, [ev.Encoded(0, 99, digest(1)[:32]), *MINE], LOG)
    others = tape(1, THEIRS, LOG)
    assert script_of([lone, others]) == script_of([tape(0, MINE, LOG), others])
