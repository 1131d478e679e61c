"""The loop side of a rank: bytes come, are checked, kept, served and freed as the machines say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from mend.codec import CODECS
from mend.consensus.records import Drop, Ended, Offer, Record, merge_member_of
from mend.coordination import events as ev
from mend.coordination.fetch_queue import RETRY_NS_MAX
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.machines import Machines
from mend.coordination.messages import MergeProposal, Message, OfferId, Pulled, RankReport, Refusal
from mend.coordination.rank import RankMachine
from mend.engine.compute import buffers
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.digest import digest_of_state
from mend.engine.compute.numerics import Numerics
from mend.engine.io.host import (
    FOREIGN_FRAMES,
    FOREIGN_GAP_NS,
    FOREIGN_NS,
    OTHER_JOBS_MAX,
    OtherJobs,
    VersionMismatches,
)
from mend.engine.joining import state_copying
from mend.engine.joining.inbox import StateInbox
from mend.engine.joining.state_copying import StateCopying
from mend.engine.joining.training_state import LikeFirst
from mend.engine.loop.concurrent_outer_step import ConcurrentOuterStep
from mend.engine.loop.feature import Features
from mend.engine.loop.pulls_ahead import GUESSES_MAX, PullsAhead
from mend.engine.rank_factory import loop_features
from mend.engine.state.fragment_state import OpenOffer
from mend.engine.state.published_state import PublishedState
from mend.errors import (
    Diverged,
    JobLost,
    MendError,
    OtherJob,
    OtherVersion,
    PlanMismatch,
    Refused,
    TransferStalled,
    WorkerFailed,
    require,
)
from mend.events.base import LoggedEvent
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.transport.bulk_client import THIN_MAX
from mend.transport.bulk_wire import checksum_of
from mend.transport.growth import Growth
from mend.types import (
    SECOND,
    Address,
    Extent,
    Member,
    Meter,
    Owned,
    Peer,
    Span,
    growing_key,
    offer_key,
    state_key,
)
from tests.noted import pair
from tests.unit.coordination.nouns import commit, genesis, member, offer, rank_orders

T = TypeVar("T")

N = 4
WHOLE_N = Owned((Span(0, N),), N)
MINE, THEIRS = member(1), member(0)


@dataclass
class Asked:
    """A pull that is under way."""

    holders: Sequence[Address]
    key: bytes
    checksum: str
    into: memoryview
    done: Callable[[Exception | None], None]

    def arrives(self, values: Tensor) -> None:
        self.into[:] = values.numpy().tobytes()
        self.done(None)


@dataclass
class Early:
    """A pull of an offer that is not announced yet."""

    holder: Address
    key: bytes
    into: memoryview
    done: Callable[[Exception | None], None]
    meter: Meter

    def arrives(self, values: Tensor) -> None:
        self.into[:] = values.numpy().tobytes()
        self.meter.verified, self.meter.checksum = self.meter.size, checksum_of(self.into)
        self.done(None)


@dataclass
class HandEdge:
    """The outside world: pulls end when the test says so, workers are done at once."""

    now: int = SECOND
    sent: list[tuple[Peer, Message]] = field(default_factory=list)
    pulls: list[Asked] = field(default_factory=list)
    ahead: list[Early] = field(default_factory=list)
    served: dict[bytes, bytes] = field(default_factory=dict)
    growing: dict[bytes, tuple[memoryview, Growth]] = field(default_factory=dict)
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def now_ns(self) -> int:
        return self.now

    def connect(self, peer: Peer, address: str) -> None:
        raise AssertionError("a rank that does not coordinate connects to nobody")

    def send(self, to: Peer, body: Message) -> None:
        self.sent.append((to, body))

    def work(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        try:
            result: T | Exception = job()
        except Exception as error:
            result = error
        done(result)

    def fetch(
        self, holders: Sequence[Address], key: bytes, checksum: str, into: memoryview,
        done: Callable[[Exception | None], None],
        extent: Extent | None = None, meter: Meter | None = None,
    ) -> None:  # fmt: skip
        self.pulls.append(Asked(holders, key, checksum, into, done))

    def pull_ahead(
        self, holder: Address, key: bytes, into: memoryview,
        done: Callable[[Exception | None], None], meter: Meter,
    ) -> None:  # fmt: skip
        self.ahead.append(Early(holder, key, into, done, meter))

    def serve(self, key: bytes, view: memoryview, growth: Growth | None = None) -> None:
        if growth is None:
            self.served[key] = bytes(view)
        else:
            self.growing[key] = view, growth

    def drop(self, key: bytes) -> None:
        self.served.pop(key, None)
        self.growing.pop(key, None)

    def note(self, event: LoggedEvent) -> None:
        self.notes.append(pair(event))

    def finished(self) -> None:
        raise AssertionError("only leaders and coordinators finish")

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.notes if name == kind]


class Story:
    """Rank 1 of rack 1: no leader, so that the test says what the leader would."""

    def __init__(
        self, first: float = 0.0, theirs: float = 0.0, merge: str = "mean",
        owned: Owned = WHOLE_N, plain: tuple[tuple[bool, ...], ...] = (),
        features: Features = loop_features,
    ) -> None:  # fmt: skip
        self.numerics = Numerics(CODECS["float32"](), MERGES[merge](), OUTERS["nesterov"](1.0, 0.0))
        self.first, self.theirs = self.anchor(first), self.anchor(theirs)
        self.host, self.published, self.serial = HandEdge(), PublishedState(1), 0
        self.me = Peer(1, 1)
        options = RankOptions(SECOND, 2, sums=merge == "rda")
        machine = RankMachine(self.me, MINE, options, (self.first.digest,))
        self.rank = ConcurrentOuterStep(
            self.me, MINE, Machines(machine), [owned], [self.first],
            self.numerics, self.published, self.host, plain, features=features,
        )  # fmt: skip
        self.inbox = self.published.of(StateInbox)
        self.copying = require(self.rank.feature(StateCopying), "every rank copies states")
        begin = genesis(racks=3, ranks=2)
        digests = ((begin.digests[0][0], self.theirs.digest),)
        self.records: list[Record] = [replace(begin, digests=digests)]

    def anchor(self, value: float, version: int = 0) -> Anchor:
        return self.numerics.adopt(torch.full((N,), value), N, version)

    def told(self, *records: Record, **fields: Any) -> None:
        self.records += records
        self.serial += 1
        body = rank_orders(self.serial, self.records, **fields)
        self.rank.heard(Peer(1, 0), MINE.incarnation, body)

    def later(self, after_ns: int = RETRY_NS_MAX) -> None:
        self.host.now += after_ns
        self.rank.tick()

    @property
    def report(self) -> RankReport:
        """The last that it has sent."""
        (_, report) = self.host.sent[-1]
        assert isinstance(report, RankReport)
        return report

    @property
    def anchors(self) -> dict[int, Anchor]:
        """What the training thread sees."""
        return self.published.fragments[0].anchors

    def arrived(self, made: Offer, values: Tensor) -> None:
        (asked,) = [pull for pull in self.host.pulls if pull.key == key_of(made)]
        self.host.pulls.remove(asked)
        asked.arrives(values)


def key_of(made: Offer) -> bytes:
    return offer_key(made.member, 1, made.fragment, made.seq)


def theirs_of(values: Tensor, rack: int = 0) -> Offer:
    """A rack's offer with these values as rank 1's part."""
    return replace(
        offer(rack, ranks=2), checksums=bytes(16) + bytes.fromhex(checksum_of(values.numpy().data))
    )


def holding_an_offer(**options: Any) -> tuple[Story, Offer, Tensor]:
    """Of rack 0, and the values of this rank's part of it, which has come."""
    story, delta = Story(**options), torch.full((N,), 0.5)
    made = theirs_of(delta)
    story.told(offers=(made,))
    story.arrived(made, delta)
    return story, made, delta


# -------------------------------------------------------------- which rounds are open


def test_a_round_is_open_from_its_first_offer_until_its_members_are_fixed() -> None:
    story = Story()
    story.told()
    assert story.published.orders.opened == {}
    late, first = offer(2, applied=0, ranks=2), offer(0, applied=1, base=1, ranks=2)
    story.told(offers=(first, late))
    assert story.published.orders.opened == {0: 1}, "the late one opens nothing"
    story.told(offers=(first, late), proposals=(MergeProposal(0, 2, 1, (first,)),))
    assert story.published.orders.opened == {}
    story.told(offers=(late,), proposals=(MergeProposal(0, 2, 1, (first,)),))
    assert story.published.orders.opened == {0: 0}, "which the training thread finds to be decided"


# -------------------------------------------------------------- a donor is not trusted


def test_a_copied_state_is_shown_only_with_the_digest_of_the_log() -> None:
    story = Story(first=1.0, theirs=2.0)
    story.told()
    (asked,) = story.host.pulls
    assert asked.key == state_key(1, 0, 0, story.theirs.digest)
    asked.arrives(torch.full((N,), 2.5))
    assert story.anchors == {}
    ((note),) = story.host.noted("copy-failed")
    assert note["error"] == "the donor's bits are not those of the log"
    story.later()
    story.host.pulls[1].arrives(torch.full((N,), 2.0))
    assert story.anchors[0].digest == story.theirs.digest
    assert torch.equal(story.anchors[0].values, torch.full((N,), 2.0))
    assert asked.key in story.host.served, "and it is a donor itself now"


def test_a_donor_that_does_not_answer_is_asked_again() -> None:
    story = Story(first=1.0, theirs=2.0)
    story.told()
    story.host.pulls[0].done(TransferStalled("no byte"))
    assert story.host.noted("copy-failed")[0]["error"] == "TransferStalled: no byte"
    story.later()
    assert len(story.host.pulls) == 2


def test_pull_begins_without_locking_memory_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "POOLED_BYTES_MIN", 1)
    locks: list[int] = []

    class Pin:
        def lock(self, address: int, size: int) -> None:
            locks.append(size)

        def unlock(self, address: int) -> None:
            locks.pop()

    story = Story(first=1.0, theirs=2.0)
    story.numerics.buffers = buffers.Buffers(2, Pin())
    theirs = theirs_of(torch.full((N,), 1.0))
    story.told(offers=(theirs,))
    state, _ = story.host.pulls
    assert locks == []
    state.arrives(torch.full((N,), 2.0))
    assert story.anchors[0].digest == story.theirs.digest
    assert len(locks) == 1, "the worker has locked the anchor, which goes to the device"


# -------------------------------------------------------------- payloads


def test_payloads_are_served_merged_and_freed() -> None:
    story, delta = Story(), torch.full((N,), 0.5)
    made = theirs_of(delta)
    story.told(offers=(made,))
    assert story.host.pulls[0].checksum == made.checksum(1), "this rank's part"
    story.arrived(made, delta)
    assert story.host.served[key_of(made)] == delta.numpy().tobytes()
    story.told(offers=(made,), proposals=(MergeProposal(0, 1, 1, (made,)),))
    result = story.anchor(-0.5, version=1)
    assert story.report.held[0].digests == (result.digest,)
    assert 1 not in story.anchors, "it is not decided"
    decided = replace(commit(1, [made]), digests=("", result.digest))
    story.told(decided, settled=(0,))
    assert torch.equal(story.anchors[1].values, torch.full((N,), -0.5))
    assert state_key(1, 0, 1, result.digest) in story.host.served
    assert key_of(made) in story.host.served, "another rack may still need it"
    (noted,) = story.host.noted("commit")
    assert noted["live"] == 0, "nobody has said who lives"
    assert noted.get("balance") is None, "nothing was compared with the momentum"
    story.told(settled=(1,))
    assert key_of(made) not in story.host.served
    assert story.rank.store.payloads == {}


def test_commit_has_the_balance_of_its_offers_with_the_momentum() -> None:
    story, delta = Story(), torch.full((N,), 0.5)
    made = replace(theirs_of(delta), along=3, against=1)
    story.told(offers=(made,))
    story.arrived(made, delta)
    story.told(offers=(made,), proposals=(MergeProposal(0, 1, 1, (made,)),))
    result = story.anchor(-0.5, version=1)
    record = replace(commit(1, [made]), members=(merge_member_of(made),))
    story.told(replace(record, digests=("", result.digest)), settled=(0,))
    (noted,) = story.host.noted("commit")
    assert noted["balance"] == 0.5


def test_racks_that_differ_look_at_their_inputs_and_fetch_what_is_spoiled() -> None:
    story, made, delta = holding_an_offer()
    story.rank.store.payloads[THEIRS, 0, 1].data_B[0] ^= 1  # a bit flips in memory
    story.told(proposals=(MergeProposal(0, 1, 1, (made,)),))
    story.told(proposals=(MergeProposal(0, 1, 2, (made,)),))
    errors = [note["error"] for note in story.host.noted("fetch-failed")]
    assert errors == ["its bytes changed in memory"]
    story.later()
    story.arrived(made, delta)
    story.later()
    assert story.report.held[0].digests == (story.anchor(-0.5, version=1).digest,)


def test_a_spoiled_anchor_is_found_and_copied_from_a_donor() -> None:
    story, made, _ = holding_an_offer()
    story.first.data[2] += 1
    story.told(proposals=(MergeProposal(0, 1, 2, (made,)),))
    assert story.anchors == {}, "the training thread must not take it for good"
    story.later()
    (asked,) = story.host.pulls
    assert asked.key == state_key(1, 0, 0, story.theirs.digest)


def test_a_payload_of_another_size_fails_the_merge_and_stops_nobody() -> None:
    story, made, _ = holding_an_offer()
    story.rank.store.payloads[THEIRS, 0, 1].data_B = torch.zeros(3, dtype=torch.uint8)
    story.told(proposals=(MergeProposal(0, 1, 1, (made,)),))
    assert "WireError" in story.host.noted("merge-failed")[0]["error"]
    assert story.published.failure is None


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_bytes_that_were_sent_and_hold_no_numbers_are_reported_and_merged_no_more(
    merge: str,
) -> None:
    story, bad = Story(merge=merge), torch.tensor([0.5, float("nan"), 0.5, 0.5])
    made = theirs_of(bad)
    story.told(offers=(made,))
    story.arrived(made, bad)
    story.told(proposals=(MergeProposal(0, 1, 1, (made,)),))
    assert story.report.held == ()
    (found,) = story.report.bad
    assert found.offer == OfferId(THEIRS, 0, 1)
    assert "NaN, Inf or magnitudes of inf" in found.reason
    story.later()
    assert len(story.host.noted("merge-failed")) == 1, "it is not tried again"
    story.told(Drop(0, (Ended(THEIRS, 1),), "rack 0 has diverged", diverged=True))
    assert story.report.bad == ()
    assert story.rank.store.payloads == {}


def test_payload_corrupted_in_own_memory_blames_no_rack() -> None:
    """A bit flips in this rack's memory: the sender's bytes were good, so he must not end."""
    story, made, delta = holding_an_offer()
    story.rank.store.payloads[THEIRS, 0, 1].data_B.view(torch.float32)[2] = float("nan")
    story.told(proposals=(MergeProposal(0, 1, 1, (made,)),))
    assert story.report.bad == ()
    (note,) = story.host.noted("fetch-failed")
    assert note["error"] == "its bytes changed in memory"
    story.later()
    story.arrived(made, delta)
    story.later()
    assert story.report.held[0].digests == (story.anchor(-0.5, version=1).digest,)


def test_an_anchor_that_holds_no_numbers_ends_the_job_here() -> None:
    """Version 0 was NaN already: no member is to blame, and there is nothing to merge onto."""
    story, made, _ = holding_an_offer(first=float("nan"), theirs=float("nan"))
    story.told(proposals=(MergeProposal(0, 1, 1, (made,)),))
    assert isinstance(story.published.failure, Diverged)
    assert "rack 1, fragment 0, version 0: the anchor itself" in str(story.published.failure)


def test_an_own_offer_that_the_log_calls_bad_is_told_to_the_training_thread() -> None:
    story = Story()
    story.told(Drop(0, (Ended(MINE, 1),), "rack 1 has diverged: NaN", diverged=True))
    assert story.published.fragments[0].discarded == {1: "rack 1 has diverged: NaN"}


# -------------------------------------------------------------- own captures


def captured(story: Story, snapshot: Tensor) -> OpenOffer:
    made = OpenOffer(0, 1, 8, 10, 2, 10, 2, story.first, snapshot, None)
    story.rank.captured(made)
    return made


# -------------------------------------------------------------- pulls before the announcement


def expecting(*offers: Offer) -> tuple[Story, dict[Member, Early]]:
    """A rank that has captured, and its early pulls. `offers`: announced before."""
    story = Story()
    story.told(offers=offers)
    captured(story, torch.full((N,), 0.25))
    keys = {growing_key(member(rack), 1, 0, 0): member(rack) for rack in (0, 2)}
    return story, {keys[early.key]: early for early in story.host.ahead}


@pytest.mark.parametrize("announced_first", [True, False])
def test_bytes_pulled_before_announcement_count_with_its_checksum(announced_first: bool) -> None:
    story, early = expecting()
    assert early.keys() == {THEIRS, member(2)}
    assert early[THEIRS].holder == story.rank.rank_machine.folded.seats[0].lanes[1]
    delta = torch.full((N,), 0.5)
    made = theirs_of(delta)
    if announced_first:
        story.told(offers=(made,))
        assert story.host.pulls == []
        assert key_of(made) not in story.host.served
        early[THEIRS].arrives(delta)
    else:
        early[THEIRS].arrives(delta)
        assert key_of(made) not in story.host.served, "nobody has said that it is an offer"
        story.told(offers=(made,))
    assert story.host.pulls == []
    assert story.host.served[key_of(made)] == delta.numpy().tobytes()
    assert story.rank.store.pulls.standing({}) == (Pulled(0, 4 * N, 0),)


@pytest.mark.parametrize("announced_first", [True, False])
@pytest.mark.parametrize("fault", ["other bytes", "gone"])
def test_offer_is_pulled_as_ever_where_the_early_pull_brings_another_or_none(
    fault: str, announced_first: bool
) -> None:
    story, early = expecting()
    delta = torch.full((N,), 0.5)
    made = theirs_of(delta)

    def ends() -> None:
        if fault == "gone":
            early[THEIRS].done(TransferStalled("no byte"))
        else:
            early[THEIRS].arrives(-delta)

    for happens in [lambda: story.told(offers=(made,)), ends][:: 1 if announced_first else -1]:
        happens()
    assert key_of(made) not in story.host.served
    assert story.host.noted("fetch-failed") == [], "it is no trouble"
    story.arrived(made, delta)
    assert story.host.served[key_of(made)] == delta.numpy().tobytes()


def test_offer_of_another_version_is_not_taken_for_the_expected_one() -> None:
    story, early = expecting()
    delta = torch.full((N,), 0.5)
    early[THEIRS].arrives(delta)
    made = replace(theirs_of(delta), base=1)
    story.told(offers=(made,))
    assert [asked.key for asked in story.host.pulls] == [key_of(made)]


def test_rack_out_of_step_is_asked_ahead_twice_at_a_time() -> None:
    """Each waits a second for an offer that it does not make. All turns of its lane were taken by
    them, so no offer of a rack that had joined again came in time, and none was ever merged."""
    story = Story()
    story.told()
    ahead, racks = PullsAhead(story.rank.store), [(THEIRS, Address("rack0", 7))]
    for base in range(5):
        ahead.begin(0, base, racks)
    asked = [early for early in story.host.ahead if early.holder.host == "rack0"]
    assert len(asked) == GUESSES_MAX < THIN_MAX
    asked[0].done(TransferStalled("no byte"))
    ahead.begin(0, 5, racks)
    assert story.host.ahead[-1].key == growing_key(THEIRS, 1, 0, 5)
    assert ahead.join(replace(theirs_of(torch.ones(N)), base=5), 4 * N, "", lambda *_: None)
    ahead.begin(0, 6, racks)
    assert story.host.ahead[-1].key == growing_key(THEIRS, 1, 0, 6), "an announced one is no guess"


def test_announced_offer_is_not_asked_for_twice() -> None:
    _, early = expecting(theirs_of(torch.full((N,), 0.5)))
    assert early.keys() == {member(2)}


def test_offer_grows_while_it_is_encoded_and_is_dropped_with_it() -> None:
    story, _ = expecting()
    view, growth = story.host.growing[growing_key(MINE, 1, 0, 0)]
    assert (len(view), growth.filled) == (4 * N, 4 * N)
    assert bytes(view) == story.host.served[offer_key(MINE, 1, 0, 1)]
    story.rank.tell(ev.Discarded(0, 1))
    assert story.host.growing == {}


def test_refused_offer_stops_growing_before_its_bad_part() -> None:
    story = Story()
    story.told()
    captured(story, torch.tensor([0.0, float("nan"), 0.0, 0.0]))
    _, growth = story.host.growing[growing_key(MINE, 1, 0, 0)]
    assert (growth.filled, growth.failed) == (0, True)


def test_a_snapshot_becomes_a_payload_that_is_served() -> None:
    story = Story()
    story.told()
    made = captured(story, torch.full((N,), 0.25))
    assert torch.equal(made.delta_N, torch.full((N,), -0.25)), "anchor - snapshot"
    key = offer_key(MINE, 1, 0, 1)
    assert story.host.served[key] == made.delta_N.numpy().tobytes()
    assert story.report.parts[0].checksum == checksum_of(story.host.served[key])
    story.rank.tell(ev.Discarded(0, 1))
    assert story.host.served.keys() == {state_key(1, 0, 0, story.first.digest)}
    assert story.rank.store.offers == {}


def test_a_capture_with_nan_is_refused_at_home() -> None:
    story = Story()
    story.told()
    captured(story, torch.tensor([0.0, float("nan"), 0.0, 0.0]))
    assert story.report.parts[0].declined == "its delta is not finite"
    assert "element 1 of the delta" in story.host.noted("declined")[0]["reason"]
    assert "element 1" in story.published.last_error
    story.told(discarded=((0, 1),))
    assert story.published.fragments[0].discarded == {1: ""}


def test_a_bug_in_a_worker_stops_the_rack_where_the_user_looks() -> None:
    story = Story()
    story.told()
    captured(story, torch.zeros(N + 1))  # of another size than its anchor
    assert isinstance(story.published.failure, WorkerFailed)
    assert story.published.failure.__cause__ is not None


# -------------------------------------------------------------- another version


def test_a_rack_that_waits_for_the_start_ends_when_another_version_keeps_talking() -> None:
    story, found = Story(), OtherVersion(3, 2, "job", 0, "")
    for _ in range(FOREIGN_FRAMES):
        story.rank.tick()
        assert story.published.failure is None, "the other must hear it first"
        story.rank.foreign(found)
    story.later(FOREIGN_NS)
    assert isinstance(story.published.failure, Refused)
    assert "rack 0 speaks wire version 3, this is version 2" in str(story.published.failure)


def test_one_late_frame_of_another_version_ends_nobody() -> None:
    story = Story()
    story.rank.foreign(OtherVersion(3, 2, "job", 0, ""))
    story.later(10 * FOREIGN_NS)
    assert story.published.failure is None


def test_two_versions_do_not_answer_each_other_without_end() -> None:
    """Each answer is a frame of another version to the other side."""
    host = HandEdge()
    foreigners = VersionMismatches(host)
    for _ in range(100):
        foreigners.met(OtherVersion(3, 2, "job", 7, ""), [Peer(1, 0), Peer(7, 0)])
    assert [to for to, _ in host.sent] == [Peer(7, 0), Peer(1, 0)]
    host.now += FOREIGN_GAP_NS
    foreigners.met(OtherVersion(3, 2, "job", 7, ""))
    assert len(host.sent) == 3


def test_a_running_job_is_not_moved_by_another_version() -> None:
    story = Story()
    story.told()
    for _ in range(2 * FOREIGN_FRAMES):
        story.rank.foreign(OtherVersion(3, 2, "job", 0, ""))
        story.later(FOREIGN_NS)
    assert story.published.failure is None
    assert "wire version 3" in story.published.last_error


# -------------------------------------------------------------- what people are told


def test_a_rack_that_falls_silent_and_one_that_is_back_are_named_once() -> None:
    story = Story()
    story.told(live=(0, 1, 2))
    for _ in range(2):
        story.told(live=(0, 1), why=("fragment 0: waiting for rack 2",))
    assert story.host.noted("rack-silent") == [
        {"peer": 2, "effect": "fragment 0: waiting for rack 2"}
    ]
    story.told(live=())
    story.told(live=(0, 1, 2))
    story.told(live=(0, 1, 2))
    assert story.host.noted("rack-back") == [{"peer": 2}]


@pytest.mark.parametrize(
    ("kind", "error"), [("PlanMismatch", PlanMismatch), ("NoSuchThing", Exception)]
)
def test_failure_in_the_orders_is_published_with_its_own_type(
    kind: str, error: type[Exception]
) -> None:
    story = Story()
    story.told(failure=(kind, "lr is 9 there and 0.1 here"))
    assert isinstance(story.published.failure, error)
    assert "lr is 9 there and 0.1 here" in str(story.published.failure)


@pytest.mark.parametrize(
    "kind", ["Unmergeable", "OtherVersion", "NotDeterministic", "ConfigError", "Evicted", "errno"]
)
def test_failure_of_a_kind_that_leaders_never_name_is_a_plain_mend_error(kind: str) -> None:
    """The name comes from another process. `Unmergeable` takes two arguments, and the TypeError
    ended the loop; `Evicted` ended the process with the status of an eviction."""
    story = Story()
    story.told(failure=(kind, "why"))
    assert type(story.published.failure) is MendError
    assert str(story.published.failure) == f"{kind}: why"


def test_a_rank_that_may_train_does_not_begin_again_as_the_job_is_lost() -> None:
    """The last of the bytes came when a candidate was told that they had not: it holds the job."""
    for whole in (False, True):
        story = Story(theirs=1.0)
        story.told()
        if whole:
            (pull,) = story.host.pulls
            pull.arrives(story.theirs.data)
        for _ in range(2):
            story.told(failure=("JobLost", "rack 0 died"))
        assert isinstance(story.published.failure, JobLost) == (not whole)
        assert len(story.host.noted("job-lost")) == (not whole)
        assert (story.published.looks > 0) == whole, "another rank of the rack may lack some"


# -------------------------------------------------------------- a donor


def test_only_what_its_leader_says_last_names_the_racks_that_ask_a_donor() -> None:
    """Orders that come late, twice, or from elsewhere would take the request back."""
    story, joins = Story(), Member(2, 9)
    story.told(asked=(joins,))
    assert story.inbox.asked == (joins,)
    late = rank_orders(1, story.records)
    story.rank.heard(Peer(1, 0), MINE.incarnation, late)
    newer = rank_orders(9, story.records)
    story.rank.heard(Peer(1, 0), MINE.incarnation + 1, newer)
    story.rank.heard(Peer(2, 0), MINE.incarnation, newer)
    assert story.inbox.asked == (joins,)
    story.told()
    assert story.inbox.asked == ()


def test_a_rank_that_has_what_its_first_rank_has_serves_nothing_and_says_what_it_has() -> None:
    story, joins = Story(), Member(2, 9)
    story.told(asked=(joins,))
    before = set(story.host.served)
    story.copying.give(joins, 3, LikeFirst(100, "d" * 32))
    assert story.host.served.keys() == before
    copy = story.rank.rank_machine.copies.given[joins]
    assert (copy.step, copy.size, copy.digest, copy.refused) == (3, 100, "d" * 32, "")


def test_a_donor_whose_copy_is_freed_makes_another_when_it_is_asked_again() -> None:
    """As where a new coordinator does not know of the joining rack at first."""
    story, joins = Story(), Member(2, 9)
    story.told(asked=(joins,))
    story.inbox.given.add(joins)
    before = set(story.host.served)
    story.copying.give(joins, 3, torch.ones(4, dtype=torch.uint8))
    assert len(story.host.served.keys() - before) == 1
    story.told()
    assert story.host.served.keys() == before
    assert story.inbox.given == set()


def test_a_donor_without_memory_for_a_copy_trains_on() -> None:
    """Its copy is refused for the same reason, and another rack may give one."""
    story = Story()
    story.copying.reserve(1 << 62)
    assert story.published.failure is None
    assert story.inbox.room_B is not None, "nobody waits for it any more"
    assert story.inbox.room_B.numel() == 0


def test_memory_for_a_copy_is_touched_on_the_worker_in_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So is the digest of the copy: encoding and merging wait for one portion, not for all."""
    story, jobs = Story(), list[object]()
    work = story.host.work
    monkeypatch.setattr(state_copying, "PORTION_BYTES", 4)
    monkeypatch.setattr(story.host, "work", lambda job, done: (jobs.append(job), work(job, done)))
    story.copying.reserve(10)
    assert story.inbox.room_B is not None
    assert (story.inbox.room_B.tolist(), len(jobs)) == ([0] * 10, 3)
    copied_B = torch.arange(10, dtype=torch.uint8)
    story.copying.give(Member(2, 9), 3, copied_B)
    assert len(jobs) == 6
    assert story.rank.rank_machine.copies.given[Member(2, 9)].digest == digest_of_state(copied_B)


def test_process_of_another_job_is_noted_once_and_answered_where_it_listens() -> None:
    host = HandEdge()
    connected: list[str] = []
    host.connect = lambda peer, address: connected.append(address)
    jobs = OtherJobs(host)
    for _ in range(3):
        jobs.met(OtherJob("a", "b", 1, ""))
        jobs.met(OtherJob("a", "b", 0xFFFF, "tcp://10.0.0.9:1"))
    assert len(host.noted("other-job")) == 2
    assert connected == ["tcp://10.0.0.9:1"], "not more often than every FOREIGN_GAP_NS"
    ((_, refusal),) = host.sent
    assert isinstance(refusal, Refusal)
    assert "the witness is of job 'a', this is job 'b'" in refusal.detail
    assert "rack 1 is of job 'a'" in jobs.in_words
    for rack in range(2, 40):
        jobs.met(OtherJob("x" * 4000, "b", rack, ""))
    assert len(host.noted("other-job")) == OTHER_JOBS_MAX
    assert len(jobs.in_words) < 2000
