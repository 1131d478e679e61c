"""Local rank 0 speaks for its rack: what one rank lacks, the rack lacks; what one fears, all
hear."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from mend.consensus.ballots import ballot_of
from mend.consensus.log import Log
from mend.consensus.records import (
    RECORDS_FORMAT,
    TEXT_MAX,
    Ballot,
    Commit,
    Lineage,
    Record,
    checksums_of,
)
from mend.coordination.events import Connect, Effect, Fail, Heard, Send, Sum, Summed, Tick
from mend.coordination.flow import batch_ns
from mend.coordination.leader import PROGRESS_NS, Leader, LeaderOptions
from mend.coordination.messages import (
    LIVES_MAX,
    Bad,
    CapturePart,
    Challenge,
    Held,
    Hello,
    MergeProposal,
    Message,
    OfferId,
    Partial,
    Prepare,
    RankOrders,
    Reason,
    Refusal,
    Report,
    Total,
    Vote,
)
from mend.types import SECOND, WITNESS, Peer, life_of
from tests.unit.coordination.nouns import (
    DETECT_NS,
    HEARTBEAT_NS,
    commit,
    digest,
    genesis,
    hello,
    lineage,
    member,
    notes,
    offer,
    offer_id,
    orders,
    rank_report,
    roster,
    sent,
)

RACK = 1
COORDINATOR = Peer(WITNESS, 0)
START_NS = 30 * SECOND
COORDINATOR_LIFE = 77
EPOCH = ballot_of(1, WITNESS)


class Rack:
    """The leader of rack 1, its ranks, and a coordinator, all told what to say by the test."""

    def __init__(self, ranks: int = 1, fragments: int = 1) -> None:
        self.ranks, self.fragments = ranks, fragments
        self.now_ns = 100 * SECOND
        self.machine = Leader(
            hello(RACK, ranks=ranks, fragments=fragments), COORDINATOR,
            LeaderOptions(HEARTBEAT_NS, DETECT_NS, START_NS), self.now_ns, "tcp://witness:1",
        )  # fmt: skip
        self.reports = {rank: rank_report(0, fragments) for rank in range(ranks)}
        self.log = Log()
        self.orders_serial = 0
        self.last: dict[Peer, Message] = {}

    def hear(self, peer: Peer, incarnation: int, body: Message) -> list[Effect]:
        return self._give(Heard(peer, incarnation, body))

    def say(self, rank: int, **changes: Any) -> list[Effect]:
        """Everything else of the rank's report stays as it was."""
        orders = self.last.get(Peer(RACK, rank))
        heard = orders.serial if isinstance(orders, RankOrders) else 0
        changes = {"heard": heard, "serial": self.reports[rank].serial + 1, **changes}
        self.reports[rank] = replace(self.reports[rank], **changes)
        return self.hear(Peer(RACK, rank), member(RACK).incarnation, self.reports[rank])

    def told(self, *records: Record, decided: int | None = None, **fields: Any) -> list[Effect]:
        """Orders with the whole log so far and these records behind it, all decided."""
        for record in records:
            self.log.append(record)
        self.orders_serial += 1
        last = self.log.last if decided is None else decided
        given = {"ballot": EPOCH, "decided": last, **fields}
        return self.hear(
            COORDINATOR, COORDINATOR_LIFE, orders(self.orders_serial, self.log.after(0), **given)
        )

    def tick(self, after_ns: int = 0) -> list[Effect]:
        self.now_ns += after_ns
        return self._give(Tick())

    def sleep(self, for_ns: int) -> list[Effect]:
        """The process gets no processor for so long, and then runs."""
        self.now_ns += for_ns
        return self.machine.handle(Tick(), self.now_ns)

    def summed(self, *facts: Any) -> list[Effect]:
        """A worker is done with what the machine asked for."""
        return self._give(Summed(*facts))

    def _give(self, event: Heard | Tick | Summed) -> list[Effect]:
        self.machine.sleep.clock.ran_ns = self.now_ns  # awake, however long nothing came
        effects = self.machine.handle(event, self.now_ns)
        self.last |= {
            e.to: e.body
            for e in effects
            if isinstance(e, Send) and isinstance(e.body, Report | RankOrders)
        }
        return effects

    def begun(self) -> Rack:
        for rank in range(self.ranks):
            self.say(rank)
        self.told(genesis(ranks=self.ranks, fragments=self.fragments))
        return self

    @property
    def report(self) -> Report:
        """What the coordinator heard last."""
        body = self.last[COORDINATOR]
        assert isinstance(body, Report)
        return body

    def to_rank(self, rank: int) -> RankOrders:
        body = self.last[Peer(RACK, rank)]
        assert isinstance(body, RankOrders)
        return body


@pytest.fixture
def rack() -> Rack:
    return Rack().begun()


def part(rank: int = 0, seq: int = 1, **changes: Any) -> CapturePart:
    return replace(CapturePart(0, seq, 0, 4, 10, 2, digest(rank)[-32:], 0, ""), **changes)


# -------------------------------------------------------------- getting in


def hellos(effects: list[Effect]) -> int:
    return sum(isinstance(body, Hello) for body in sent(effects, COORDINATOR))


def test_hello_is_repeated_until_the_seat_is_decided() -> None:
    """A record that is not decided may be undone; then nobody else would tell that it waits."""
    rack = Rack()
    assert hellos(rack.tick()) == 1
    assert hellos(rack.tick(HEARTBEAT_NS - 1)) == 0
    assert hellos(rack.tick(1)) == 1
    rack.told(genesis(), decided=0)
    assert hellos(rack.tick(HEARTBEAT_NS)) == 1, "Genesis is here, but not decided"
    rack.told()
    assert hellos(rack.tick(HEARTBEAT_NS)) == 0


def test_a_rack_answers_at_once_that_it_lives_after_who_has_its_seat() -> None:
    rack = Rack()
    former, mine = life_of(member(RACK, 7)), member(RACK).incarnation
    rack.tick()
    assert hellos(rack.hear(Peer(2, 0), 5, Challenge(mine + 1, former))) == 0, "of another life"
    effects = rack.hear(Peer(2, 0), 5, Challenge(mine, former))
    assert [body.after for body in sent(effects) if isinstance(body, Hello)] == [(former,)]
    assert hellos(rack.hear(Peer(2, 0), 5, Challenge(mine, former))) == 0, "it has said so"
    rack.hear(Peer(2, 0), 5, Challenge(mine, life_of(member(RACK))))
    for life in range(10, 10 + LIVES_MAX):
        rack.hear(Peer(2, 0), 5, Challenge(mine, life))
    assert rack.machine.hello.after == tuple(range(10, 10 + LIVES_MAX)), "the newest"


def test_a_rack_that_is_asked_and_not_led_says_what_the_job_waits_for() -> None:
    """The witness lives, and keeps the log of a job whose racks were not all started again."""
    rack = Rack()
    rack.hear(COORDINATOR, COORDINATOR_LIFE, Challenge(member(RACK).incarnation, 5))
    (told,) = notes(rack.tick(PROGRESS_NS), "waiting")
    assert str(told["for"]).startswith("the witness knows this job")
    assert "restart every silent rack, or retire it" in str(told["for"])
    rack.hear(Peer(2, 0), 5, Challenge(member(RACK).incarnation, 6))
    (told,) = notes(rack.tick(PROGRESS_NS), "waiting")
    assert str(told["for"]).startswith("rack 2 knows this job")


def test_founder_that_is_asked_says_that_its_job_runs_instead_of_missing_a_hello() -> None:
    """It asked for the start of a rack that was running, and knew its former life."""
    rack = Rack()
    rack.hear(Peer(2, 0), 5, Challenge(member(RACK).incarnation, 6))
    rack.tick(PROGRESS_NS)
    (told,) = notes(rack.told(missing=(0, 2)), "waiting") or notes(
        rack.tick(PROGRESS_NS), "waiting"
    )
    assert str(told["for"]).startswith("rack 2 knows this job")
    rack.told(missing=(0,))
    (told,) = notes(rack.tick(PROGRESS_NS), "waiting")
    assert str(told["for"]).startswith("no hello from rack 0")


def test_an_unanswered_start_ends_with_the_address_that_did_not_answer() -> None:
    rack = Rack()
    assert not any(isinstance(e, Fail) for e in rack.tick(START_NS))
    (failure,) = [e for e in rack.tick(1) if isinstance(e, Fail)]
    assert failure.kind == "StartTimeout"
    assert failure.detail.startswith(
        "after 30 s: no answer from the coordinator (the witness at tcp://witness:1); is it running"
    )
    assert rack.to_rank(0).failure == (failure.kind, failure.detail)
    effects = rack.tick(SECOND)
    assert not any(isinstance(e, Fail) for e in effects), "said once"
    assert hellos(effects) == 0, "a rack that has failed does not ask again"


def test_a_start_without_all_racks_names_those_that_are_missing() -> None:
    rack = Rack()
    rack.told(missing=(0, 3))
    (failure,) = [e for e in rack.tick(START_NS + 1) if isinstance(e, Fail)]
    assert "no hello from rack 0, 3; start it with the same job_id" in failure.detail
    refused = Rack()
    refused.told(missing=(0,), why=(Reason("steps is 9 there and 8 here", refused=0),))
    (failure,) = [e for e in refused.tick(START_NS + 1) if isinstance(e, Fail)]
    assert failure.detail.endswith("rack 0; rack 0 was refused: steps is 9 there and 8 here")


def test_a_rack_that_waits_for_a_refused_one_says_so_at_once_and_once() -> None:
    """It was said after up to five seconds only."""
    rack, why = Rack(), (Reason("steps is 9 there and 8 here", refused=0),)
    (said,) = notes(rack.told(missing=(0,), why=why), "waiting")
    assert str(said["for"]).endswith(str(why[0]))
    assert notes(rack.told(missing=(0,), why=why), "waiting") == []
    assert notes(rack.tick(PROGRESS_NS - 1), "waiting") == []
    assert len(notes(rack.tick(1), "waiting")) == 1
    again = (Reason("steps is 7 there and 8 here", refused=0),)
    assert len(notes(rack.told(missing=(0,), why=again), "waiting")) == 1, "another reason"


def test_a_start_that_waits_says_so_now_and_then() -> None:
    rack = Rack()
    assert notes(rack.tick(PROGRESS_NS - 1), "waiting") == []
    (note,) = notes(rack.tick(1), "waiting")
    assert note["seconds"] == 5
    assert "no answer from the coordinator" in str(note["for"])
    assert notes(rack.tick(PROGRESS_NS - 1), "waiting") == []
    rack.told(genesis(), decided=0)
    (note,) = notes(rack.tick(1), "waiting")
    assert note["for"] == (
        "every rack has to vote for the first record of the log, and racks 0,1 are silent"
    )


@pytest.mark.parametrize(
    ("kind", "error"), [("plan", "PlanMismatch"), ("taken", "Refused"), ("started", "Refused")]
)
def test_a_refusal_stops_all_ranks_of_the_rack(kind: str, error: str) -> None:
    rack = Rack(ranks=2)
    no = Refusal(member(RACK).incarnation, kind, "because")
    effects = rack.hear(COORDINATOR, COORDINATOR_LIFE, no)
    (failure,) = [effect for effect in effects if isinstance(effect, Fail)]
    remedy = ". Make it alike on all racks: " if kind == "plan" else ""
    assert (failure.kind, failure.detail.startswith(f"because{remedy}")) == (error, True)
    for rank in range(2):
        assert rack.to_rank(rank).failure == (failure.kind, failure.detail)
    second = rack.hear(COORDINATOR, COORDINATOR_LIFE, replace(no, detail="other"))
    assert not any(isinstance(e, Fail) for e in second), "the first reason stays"


def test_texts_beyond_the_limit_are_cut_before_they_reach_the_ranks() -> None:
    """Ranks would refuse the whole message, and learn neither why they wait nor why they stop."""
    rack = Rack()
    rack.told(missing=(0,), why=(Reason("x" * TEXT_MAX, refused=0),))
    (why,) = rack.to_rank(0).why
    assert why.startswith("rack 0 was refused: x")
    assert len(why) == TEXT_MAX
    rack.hear(
        COORDINATOR, COORDINATOR_LIFE, Refusal(member(RACK).incarnation, "plan", "x" * TEXT_MAX)
    )
    assert [len(text) for text in rack.to_rank(0).failure] == [len("PlanMismatch"), TEXT_MAX]


def test_a_refusal_of_another_life_or_of_a_stranger_is_not_mine() -> None:
    rack = Rack()
    mine = member(RACK).incarnation
    for peer, incarnation in ((COORDINATOR, mine + 1), (Peer(0, 0), mine)):
        rack.hear(peer, COORDINATOR_LIFE, Refusal(incarnation, "taken", "because"))
    assert rack.machine.failure == ("", "")


def test_a_rack_without_a_copy_begins_again_where_a_candidate_finds_the_job_lost() -> None:
    """Any of those that may coordinate, itself too. Not a rack that holds all, nor one without a
    seat, which asks for one."""
    lost = Refusal(member(RACK).incarnation, "lost", "rack 0 died")
    for versions, peer, ends in (
        ((-1, 3), COORDINATOR, True),
        ((-1, 3), Peer(RACK, 0), True),
        ((-1, 3), Peer(77, 0), False),
        ((2, 3), COORDINATOR, False),
    ):
        rack = Rack(fragments=2).begun()
        rack.say(0, versions=versions)
        effects = rack.hear(peer, COORDINATOR_LIFE, lost)
        assert (Fail("JobLost", "rack 0 died") in effects) == ends
        assert rack.hear(COORDINATOR, COORDINATOR_LIFE, replace(lost, kind="taken")) is not None
        assert rack.machine.failure[0] in ("", "JobLost"), "who has a seat is in"
    rack = Rack()
    rack.hear(COORDINATOR, COORDINATOR_LIFE, lost)
    assert rack.machine.failure == ("", "")


# -------------------------------------------------------------- one report of many


def test_rack_lacks_what_one_of_its_ranks_lacks() -> None:
    rack = Rack(ranks=2, fragments=2).begun()
    a, b = offer(0, ranks=2), offer(0, fragment=1, ranks=2)
    result = [Held(1, 4, 2, (digest(rank),)) for rank in range(2)]
    rack.say(0, versions=(3, 5), got=(offer_id(a), offer_id(b)), held=(result[0],), step=8)
    rack.say(1, versions=(4, 4), got=(offer_id(b),), held=(), step_ns=70)
    assert rack.report.versions == (3, 4)
    assert rack.report.got == (offer_id(b),)
    assert rack.report.held == ()
    assert (rack.report.step, rack.report.step_ns) == (8, 70)
    rack.say(1, held=(replace(result[1], attempt=1),))
    assert rack.report.held == (), "of another attempt"
    rack.say(1, held=(result[1],))
    assert rack.report.held == (Held(1, 4, 2, (digest(0), digest(1))),)


def test_a_report_without_news_answers_orders_in_whatever_phase_they_come(rack: Rack) -> None:
    """Each rack spoke in a phase of its own: a coordinator of 8 woke up for every one of them."""
    quarter_ns = HEARTBEAT_NS // 4
    rack.now_ns += HEARTBEAT_NS // 2  # orders come in the middle between two reports
    answered = []
    for _ in range(6):
        answered.append(bool(sent(rack.told(), COORDINATOR)))
        orders_ns, reported = rack.now_ns, []
        while (due_ns := rack.machine.deadline_ns()) < orders_ns + HEARTBEAT_NS:
            rack.now_ns = max(due_ns, rack.now_ns + 1)
            reported += sent(rack.tick(), COORDINATOR)
        assert len(reported) <= 1
        rack.now_ns = orders_ns + HEARTBEAT_NS
    assert not answered[0]
    assert all(answered[-3:]), "it has come into step"
    rack.now_ns += quarter_ns - 1
    assert sent(rack.tick(), COORDINATOR) == []
    assert len(sent(rack.tick(1), COORDINATOR)) == 1, "orders that are lost are not waited for long"


def test_news_is_reported_at_once_whenever_orders_come(rack: Rack) -> None:
    assert len(sent(rack.say(0, versions=(1,)), COORDINATOR)) == 1
    assert len(sent(rack.say(0, versions=(2,)), COORDINATOR)) == 1


def test_report_of_held_offers_waits_for_more_in_a_job_of_many_racks() -> None:
    """Each of R racks gets R offers, one after the other, which would be R reports of each rack."""
    rack = Rack()
    rack.say(0)
    rack.told(genesis(racks=20))
    rack.tick(HEARTBEAT_NS + HEARTBEAT_NS // 4)
    got = tuple(offer_id(offer(other)) for other in range(3))
    assert sent(rack.say(0, got=got[:1]), COORDINATOR) == []
    rack.now_ns += batch_ns(20) - 1
    assert sent(rack.say(0, got=got[:2]), COORDINATOR) == []
    assert rack.machine.deadline_ns() == rack.now_ns + 1
    assert len(sent(rack.tick(1), COORDINATOR)) == 1
    assert rack.report.got == got[:2]
    rack.say(0, got=got)
    assert len(sent(rack.say(0, versions=(1,)), COORDINATOR)) == 1, "that waits for nothing"
    assert rack.report.got == got


def test_a_rack_whose_ranks_are_not_all_heard_yet_has_nothing() -> None:
    rack = Rack(ranks=2)
    rack.say(0, versions=(0,), got=(offer_id(offer(0)),), leaving=True)
    rack.told(genesis(ranks=2))
    assert not rack.report.fresh
    assert rack.report.versions == (-1,)
    assert rack.report.got == ()
    assert not rack.report.leaving
    rack.say(1)
    assert rack.report.fresh
    assert rack.report.versions == (0,)


def test_a_silent_rank_is_a_silent_rack() -> None:
    rack = Rack(ranks=2).begun()
    for _ in range(3):
        rack.now_ns += DETECT_NS // 2
        rack.say(0)
    assert not rack.report.fresh
    rack.say(1)
    assert rack.report.fresh


def test_before_the_start_nobody_is_too_slow() -> None:
    rack = Rack(ranks=2)
    rack.say(0)
    rack.tick(10 * SECOND)
    assert rack.report.fresh


def test_an_offer_is_made_of_the_parts_of_all_ranks() -> None:
    rack = Rack(ranks=2).begun()
    rack.say(0, parts=(part(0, tokens=10, applied=2),))
    assert rack.report.offers == ()
    rack.say(1, parts=(part(1, tokens=7, applied=1, checksum=""),))
    assert rack.report.offers == (), "rank 1 has not encoded its part"
    rack.say(1, parts=(part(1, tokens=7, applied=1),))
    (made,) = rack.report.offers
    assert (made.member, made.tokens, made.steps, made.applied) == (member(RACK), 17, 2, 1)
    assert made.checksums == checksums_of((digest(0)[-32:], digest(1)[-32:]))
    rack.say(1, parts=(part(1, seq=2),))
    assert rack.report.offers == (), "parts of two captures are no offer"


def test_leaving_takes_all_hurry_takes_one() -> None:
    rack = Rack(ranks=2).begun()
    rack.say(0, leaving=True, idle=True, hurry=True)
    assert (rack.report.leaving, rack.report.idle, rack.report.hurry) == (False, False, True)
    rack.say(1, leaving=True, idle=True)
    assert (rack.report.leaving, rack.report.idle, rack.report.hurry) == (True, True, True)


def test_old_and_foreign_reports_are_not_heard(rack: Rack) -> None:
    rack.say(0, step=5)
    life = member(RACK).incarnation
    late = rank_report(rack.reports[0].serial - 1, step=4)
    for peer, incarnation, body in (
        (Peer(RACK, 0), life, late),
        (Peer(RACK, 0), life + 1, rank_report(99, step=9)),
        (Peer(RACK, 1), life, rank_report(99, step=9)),
        (Peer(0, 0), life, rank_report(99, step=9)),
        (Peer(RACK, 0), life, rank_report(99, fragments=2, step=9)),
    ):
        rack.hear(peer, incarnation, body)
    rack.tick(HEARTBEAT_NS)
    assert rack.report.step == 5


# -------------------------------------------------------------- sums over the rack


def test_the_sums_of_all_ranks_come_back_to_every_rank() -> None:
    rack = Rack(ranks=2).begun()
    assert not any(isinstance(e, Sum) for e in rack.say(1, partials=(Partial(0, 1, 1, b"b"),)))
    effects = rack.say(0, partials=(Partial(0, 1, 1, b"a"),))
    assert [e for e in effects if isinstance(e, Sum)] == [Sum(0, 1, 1, (b"a", b"b"))]
    assert rack.to_rank(0).totals == ()
    rack.summed(0, 1, 1, b"all")
    assert rack.to_rank(0).totals == rack.to_rank(1).totals == (Total(0, 1, 1, b"all"),)
    rack.say(0, versions=(1,), partials=())
    rack.say(1, versions=(1,), partials=())
    assert rack.to_rank(1).totals == ()


def test_sums_that_fail_are_told_and_noted(rack: Rack) -> None:
    rack.say(0, partials=(Partial(0, 1, 1, b"a"),))
    (note,) = notes(rack.summed(0, 1, 1, b"", "WireError: no sums"), "sums-failed")
    assert (note["fragment"], note["version"]) == (0, 1)
    assert rack.to_rank(0).totals == (Total(0, 1, 1, b""),)


def test_partials_of_fragments_that_are_not_there_are_not_heard(rack: Rack) -> None:
    effects = rack.say(0, partials=(Partial(7, 1, 1, b"a"),))
    assert not any(isinstance(e, Sum) for e in effects)


def test_a_log_of_another_format_is_refused_by_name() -> None:
    rack = Rack()
    effects = rack.told(replace(genesis(), format=RECORDS_FORMAT + 1))
    (fail,) = [e for e in effects if isinstance(e, Fail)]
    assert fail.kind == "Refused"
    said = f"a log of format {RECORDS_FORMAT + 1}, this mend reads format {RECORDS_FORMAT}"
    assert said in fail.detail
    assert "Run the same mend" in fail.detail
    assert not rack.machine.log.appended.begun


# -------------------------------------------------------------- captures that give no offer


def test_a_rank_that_declines_declines_for_all_and_all_forget() -> None:
    rack = Rack(ranks=2).begun()
    rack.say(0, parts=(part(0, checksum="", declined="its delta is not finite"),))
    assert rack.report.declined == (), "rank 1 has not captured yet"
    rack.say(1, parts=(part(1),))
    assert rack.report.offers == ()
    (declined,) = rack.report.declined
    assert (declined.fragment, declined.applied) == (0, 0)
    assert declined.reason == "its delta is not finite"
    for rank in range(2):
        assert rack.to_rank(rank).discarded == ((0, 1),)
    rack.say(0, parts=())
    rack.say(1, parts=())
    assert rack.to_rank(0).discarded == ()
    assert rack.report.declined == (declined,), "until the next version, so that nobody waits"
    rack.told(commit(1, [offer(0, ranks=2)], ranks=2))
    assert rack.report.declined == ()


def test_rack_reports_a_bad_payload_of_any_rank_once() -> None:
    rack = Rack(ranks=2).begun()
    first, second = OfferId(member(1), 0, 3), OfferId(member(0), 0, 4)
    rack.say(0, bad=(Bad(first, "NaN"),))
    assert rack.report.bad == (Bad(first, "NaN"),)
    rack.say(1, bad=(Bad(first, "1e30"), Bad(second, "Inf")))
    assert rack.report.bad == (Bad(second, "Inf"), Bad(first, "NaN"))


def test_the_norm_of_an_offer_is_that_of_its_greatest_part() -> None:
    rack = Rack(ranks=2).begun()
    rack.say(0, parts=(part(0, norm=0.25),))
    rack.say(1, parts=(part(1, norm=0.5),))
    assert [made.norm for made in rack.report.offers] == [0.5]


def test_a_new_offer_takes_back_that_the_last_was_declined(rack: Rack) -> None:
    rack.say(0, parts=(part(checksum="", declined="its delta is not finite"),))
    rack.say(0, parts=(part(seq=2),))
    assert rack.report.declined == ()
    assert [made.seq for made in rack.report.offers] == [2]


def test_without_a_token_there_is_no_offer() -> None:
    rack = Rack(ranks=2).begun()
    for rank in range(2):
        rack.say(rank, parts=(part(rank, tokens=0),))
    assert rack.report.offers == ()
    assert rack.report.declined[0].reason == "no tokens were trained"
    assert rack.to_rank(1).discarded == ((0, 1),)


def test_one_rank_without_a_token_is_no_reason() -> None:
    rack = Rack(ranks=2).begun()
    rack.say(0, parts=(part(0, tokens=0),))
    rack.say(1, parts=(part(1, tokens=3),))
    assert [made.tokens for made in rack.report.offers] == [3]
    assert rack.report.declined == ()


# -------------------------------------------------------------- the log


def test_records_are_accepted_as_written_and_passed_on_as_decided(rack: Rack) -> None:
    rack.told(commit(1, [offer(0)]), decided=1)
    assert (rack.report.acceptor_state.accepted, rack.report.acceptor_state.promised) == (
        EPOCH,
        EPOCH,
    )
    assert (rack.report.acceptor_state.last, rack.report.acceptor_state.decided) == (2, 1)
    assert rack.to_rank(0).records == (genesis(),)
    rack.told()
    assert rack.report.acceptor_state.decided == 2
    assert rack.to_rank(0).records == (commit(1, [offer(0)]),), "the first is under way"


def test_lineage_that_may_undo_records_is_passed_on_once_decided(rack: Rack) -> None:
    """It goes on from what the racks held when they promised; a rank that trained on more, as it
    had made the result before it was told of the decision, had other weights than its peers."""
    rack.told(commit(1, [offer(0)]), decided=1)
    rack.tick(DETECT_NS)
    candidate, life, ballot = Peer(0, 0), member(0).incarnation, ballot_of(2, 0)
    rack.hear(candidate, life, Prepare(7, ballot, rack.log.lineage, 1))
    body = orders(1, rack.log.after(0), ballot=ballot, decided=2, last=3)
    rack.hear(candidate, life, body)
    assert rack.machine.log.decided == 2, "it reads the log in pieces"
    assert rack.to_rank(0).records == (genesis(),)
    rack.log.append(lineage(ballot, [0, 1], [2]))
    body = replace(body, prev=2, chain=rack.log.chain(2), records=rack.log.after(2))
    rack.hear(candidate, life, replace(body, serial=2))
    assert (rack.machine.log.last, rack.machine.log.decided) == (3, 2)
    assert rack.to_rank(0).records == (genesis(),)
    rack.hear(candidate, life, replace(body, serial=3, decided=3))
    assert rack.machine.log.decided == 3
    assert [type(record) for record in rack.to_rank(0).records] == [Commit, Lineage]


def test_a_rank_gets_what_it_has_not_confirmed(rack: Rack) -> None:
    rack.told(commit(1, [offer(0)]))
    rack.say(0, decided=1)
    assert (rack.to_rank(0).prev, len(rack.to_rank(0).records)) == (1, 1)
    rack.tick(HEARTBEAT_NS)
    assert (rack.to_rank(0).prev, rack.to_rank(0).records) == (2, ()), "it is under way"
    rack.say(0, decided=1)
    assert (rack.to_rank(0).prev, len(rack.to_rank(0).records)) == (1, 1), "it answers without it"
    rack.say(0, decided=99)
    rack.tick(HEARTBEAT_NS)
    assert (rack.to_rank(0).prev, rack.to_rank(0).records) == (2, ())


def test_orders_are_passed_on_to_every_rank() -> None:
    rack = Rack(ranks=2).begun()
    here = offer(0, ranks=2)
    proposal = MergeProposal(0, 1, 1, (here,))
    rack.told(
        offers=(here,), proposals=(proposal,), settled=(0,), live=(0, 1), why=(Reason("because"),)
    )
    for rank in range(2):
        told = rack.to_rank(rank)
        assert (told.offers, told.proposals) == ((here,), (proposal,))
        assert (told.settled, told.live, told.why) == ((0,), (0, 1), ("because",))
        assert not told.finish


def test_replayed_and_reordered_orders_change_nothing(rack: Rack) -> None:
    first = orders(rack.orders_serial, rack.log.after(0), ballot=EPOCH, live=(0,))
    rack.told(commit(1, [offer(0)]), live=(0, 1))
    before = rack.report
    for body in (first, first):
        rack.hear(COORDINATOR, COORDINATOR_LIFE, body)
    assert rack.report.acceptor_state == before.acceptor_state
    assert rack.to_rank(0).live == (0, 1)
    rack.told()
    rack.told()
    assert rack.report.acceptor_state.last == 2, "each record is taken once"


def test_orders_are_obeyed_only_from_the_owner_of_a_current_ballot(rack: Rack) -> None:
    more = orders(99, [genesis(), commit(1, [offer(0)])], ballot=EPOCH)
    chain = rack.log.chain(1)
    nonsense = replace(more, prev=1, chain=chain, records=(commit(1, [], fragment=5),), last=2)
    for peer, body in (
        (Peer(0, 0), more),
        (Peer(WITNESS, 1), more),
        (Peer(0, 0), replace(more, ballot=ballot_of(1, 0))),
        (COORDINATOR, replace(more, ballot=ballot_of(0, WITNESS))),
        (COORDINATOR, replace(more, lineage=digest(5))),
        (COORDINATOR, replace(more, to=member(RACK, life=1).incarnation)),
        (COORDINATOR, nonsense),
    ):
        rack.hear(peer, COORDINATOR_LIFE, body)
        assert rack.report.acceptor_state.last == 1, (peer, body)
    rack.hear(COORDINATOR, COORDINATOR_LIFE, more)
    assert rack.report.acceptor_state.last == 2


def test_a_rack_follows_whoever_took_over(rack: Rack) -> None:
    """Its reports go there, and it keeps the others reachable, any of which may be the next."""
    successor, ballot = Peer(0, 0), ballot_of(2, 0)
    rack.log.append(Ballot(ballot))
    body = orders(1, rack.log.after(0), ballot=ballot)
    rack.hear(successor, member(0).incarnation, body)
    told = rack.last[successor]
    assert (told.acceptor_state.accepted, told.acceptor_state.last) == (ballot, 2)
    effects = rack.tick(HEARTBEAT_NS + HEARTBEAT_NS // 4)
    assert len(sent(effects, successor)) == 1
    assert sent(effects, COORDINATOR) == []
    assert rack.machine.farewell().to == successor
    rack.hear(COORDINATOR, COORDINATOR_LIFE, orders(99, rack.log.after(0), ballot=EPOCH))
    assert rack.machine.follower.coordinator == successor, "the old one is told that it is over"
    assert notes(rack.tick(DETECT_NS + 1), "coordinator-silent") == [
        {"peer": "rack 0 at tcp://rack0:1"}
    ]


def test_racks_that_may_coordinate_one_day_are_made_reachable_when_the_roster_changes() -> None:
    rack = Rack()
    rack.say(0)
    assert Connect(Peer(0, 0), "tcp://rack0:1") in rack.told(genesis())
    assert not any(isinstance(e, Connect) for e in rack.told(commit(1, [offer(0)])))
    effects = rack.told(roster(1, [0, 1, 2]))
    assert [e.peer.rack for e in effects if isinstance(e, Connect)] == [0, 2]


def test_a_candidate_is_answered_with_what_the_rack_holds() -> None:
    """Those who are left need to know it before they begin anew."""
    rack = Rack(fragments=2).begun()
    rack.say(0, versions=(3, 2))
    rack.tick(DETECT_NS)
    question = Prepare(7, ballot_of(2, 0), rack.log.lineage, 1)
    (vote,) = sent(rack.hear(Peer(0, 0), member(0).incarnation, question), Peer(0, 0))
    assert isinstance(vote, Vote)
    assert (vote.serial, vote.held) == (7, (3, 2))
    assert vote.acceptor_state.promised == ballot_of(2, 0)
    stranger = replace(question, lineage=digest(5))
    assert sent(rack.hear(Peer(0, 0), member(0).incarnation, stranger), Peer(0, 0)) == []


def test_a_rack_that_has_not_heard_all_its_ranks_holds_nothing() -> None:
    rack = Rack(ranks=2)
    rack.say(0, versions=(3,))
    rack.told(genesis(ranks=2))
    rack.tick(DETECT_NS)
    question = Prepare(7, ballot_of(2, 0), rack.log.lineage, 1)
    (vote,) = sent(rack.hear(Peer(0, 0), member(0).incarnation, question), Peer(0, 0))
    assert vote.held == (-1,)


def test_a_newcomer_that_is_not_answered_asks_everybody_who_may_coordinate() -> None:
    """The founder may be gone, or started again and waiting in vain."""
    rack = Rack()
    peers = (Peer(0, 0), COORDINATOR, Peer(2, 0))
    rack.machine.options = dataclasses.replace(rack.machine.options, peers=peers)
    assert asked(rack.tick(DETECT_NS)) == [COORDINATOR], "the founder first"
    assert asked(rack.tick(HEARTBEAT_NS)) == [COORDINATOR, Peer(0, 0), Peer(2, 0)]
    no = Refusal(member(RACK).incarnation, "plan", "steps is 9 there and 8 here")
    (failure,) = [each for each in rack.hear(Peer(2, 0), 5, no) if isinstance(each, Fail)]
    assert failure.kind == "PlanMismatch"
    assert failure.detail.startswith(no.detail)


def asked(effects: list[Effect]) -> list[Peer]:
    return [e.to for e in effects if isinstance(e, Send) and isinstance(e.body, Hello)]


def test_a_rack_that_the_log_has_let_go_finishes() -> None:
    rack = Rack(ranks=2).begun()
    rack.told(roster(1, [0], ranks=2), decided=1)
    assert not rack.to_rank(1).finish, "not before it is decided"
    rack.told()
    assert rack.machine.left()
    assert rack.to_rank(0).finish
    assert rack.to_rank(1).finish


# -------------------------------------------------------------- silence, and how often to speak


def test_a_silent_coordinator_is_noticed_once_and_so_is_its_return(rack: Rack) -> None:
    rack.told(live=(0, 1), why=(Reason("waiting for rack 0"),))
    assert notes(rack.tick(DETECT_NS), "coordinator-silent") == []
    (note,) = notes(rack.tick(1), "coordinator-silent")
    assert note["peer"] == "the witness at tcp://witness:1"
    assert rack.to_rank(0).live == (), "nobody knows who is live"
    assert rack.to_rank(0).why == ("the coordinator (the witness at tcp://witness:1) is silent",)
    assert notes(rack.tick(SECOND), "coordinator-silent") == []
    effects = rack.told(live=(0, 1), why=(Reason("waiting for rack 0"),))
    assert len(notes(effects, "coordinator-back")) == 1
    assert rack.to_rank(0).why == ("waiting for rack 0",)


def test_everything_is_repeated_each_heartbeat_and_said_at_once_when_new(rack: Rack) -> None:
    rack.tick(2 * HEARTBEAT_NS)
    before = rack.report
    assert sent(rack.tick(HEARTBEAT_NS - 1)) == []
    assert rack.machine.deadline_ns() == rack.now_ns + 1
    effects = rack.tick(1)
    assert [len(sent(effects, to)) for to in (Peer(RACK, 0), COORDINATOR)] == [1, 0]
    quarter_ns = HEARTBEAT_NS // 4  # in which orders may come that it can answer
    assert rack.machine.deadline_ns() == rack.now_ns + quarter_ns
    assert len(sent(rack.tick(quarter_ns), COORDINATOR)) == 1
    assert rack.report.serial > before.serial
    assert replace(rack.report, serial=0) == replace(before, serial=0)
    assert len(sent(rack.say(0, step=3), COORDINATOR)) == 1


def test_farewell_report_is_newer_than_the_last_report(rack: Rack) -> None:
    rack.say(0, step=9)
    word = rack.machine.farewell()
    assert word.to == COORDINATOR
    assert isinstance(word.body, Report)
    assert word.body.gone
    assert not rack.report.gone
    assert word.body.serial > rack.report.serial
