"""Small values of the protocol for tests: racks, hellos, offers, records. Nothing decides here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mend.consensus.ballots import ballot_of
from mend.consensus.log import RECORDS_KEPT, Log
from mend.consensus.records import (
    AcceptorState,
    Commit,
    Ended,
    Genesis,
    Lineage,
    MergeMember,
    Offer,
    Policy,
    Record,
    Roster,
    Seat,
    checksums_of,
)
from mend.consensus.weights import WHOLE
from mend.coordination.events import Effect, Note, Send
from mend.coordination.messages import (
    Hello,
    Message,
    OfferId,
    Orders,
    RankOrders,
    RankReport,
    Report,
    Resume,
)
from mend.coordination.validation import plan_hash
from mend.types import SECOND, WITNESS, Address, Member, Peer, life_of
from tests.noted import pairs

HEARTBEAT_NS = SECOND // 10
DETECT_NS = SECOND
FIRST = ballot_of(1, 0)
"""The ballot of rack 0, which founds a job without a witness."""


def member(rack: int, life: int = 0) -> Member:
    return Member(rack, (1000 * (rack + 1) + life) << 16)


def seat(rack: int, ranks: int = 1, life: int = 0) -> Seat:
    lanes = tuple(Address(f"rack{rack}", 10 + rank) for rank in range(ranks))
    return Seat(member(rack, life), f"tcp://rack{rack}:1", lanes)


def digest(number: int) -> str:
    return f"{number:064x}"


def policy(racks: int = 2, ranks: int = 1, fragments: int = 1, **changes: Any) -> Policy:
    """K = 1, a long grace, H = 8, tau = 2."""
    fields: dict[str, Any] = {
        "merge_min_racks": 1, "grace_ns": 10 * SECOND, "lockstep": False, "staleness_max_rounds": 2,
        "period_steps": 8, "overlap_steps": 2, "overlap_ramp": 0, "stall_max_ns": SECOND,
        "seat_timeout_ns": 0, "restart_attests": True,
    }  # fmt: skip
    return Policy(racks=racks, ranks=ranks, fragments=fragments, **{**fields, **changes})


def hello(
    rack: int,
    *,
    racks: int = 2,
    ranks: int = 1,
    fragments: int = 1,
    life: int = 0,
    facts: tuple[tuple[str, str], ...] = (("model", "tiny"), ("steps", "8")),
    buffers: tuple[tuple[str, str], ...] = (),
    resume: Resume | None = None,
    **changes: Any,
) -> Hello:
    """Version 0 of rack r has the digests 100 r, 100 r + 1, ... in order of fragment and rank. A
    life has heard of the one before it, as it is asked about that."""
    digests = tuple(
        tuple(digest(100 * rack + ranks * p + rank) for rank in range(ranks))
        for p in range(fragments)
    )
    plan = policy(racks, ranks, fragments, **changes)
    after = tuple(life_of(member(rack, life - 1)) for _ in range(life > 0))
    return Hello(seat(rack, ranks, life), plan, facts, digests, after, resume, buffers=buffers)


def offer(
    rack: int,
    seq: int = 1,
    *,
    fragment: int = 0,
    base: int = 0,
    applied: int | None = None,
    tokens: int = 10,
    steps: int = 2,
    ranks: int = 1,
    life: int = 0,
) -> Offer:
    return Offer(
        member(rack, life), fragment, seq, base, 8 * seq, tokens, steps,
        checksums_of(digest(seq + rank)[-32:] for rank in range(ranks)),
        base if applied is None else applied,
    )  # fmt: skip


def offer_id(of: Offer) -> OfferId:
    return OfferId(of.member, of.fragment, of.seq)


def share(of: Offer) -> MergeMember:
    return MergeMember(of.member, of.seq, of.base, of.capture_step, of.tokens, of.steps)


def genesis(racks: int = 2, ranks: int = 1, fragments: int = 1, witness: bool = False) -> Genesis:
    """With rack 0's version 0."""
    seats = tuple(seat(rack, ranks) for rack in range(racks))
    first = hello(0, racks=racks, ranks=ranks, fragments=fragments)
    third = member(WITNESS) if witness else None
    return Genesis(seats, third, first.policy, plan_hash(first), first.digests)


def commit(
    version: int,
    members: Sequence[Offer],
    *,
    fragment: int = 0,
    dropped: Sequence[Offer] = (),
    ranks: int = 1,
) -> Commit:
    """Its result has the digests 1000 version, 1000 version + 1, ... by rank."""
    return Commit(
        fragment, version, tuple(share(each) for each in members),
        tuple(Ended(each.member, each.seq) for each in dropped),
        tuple(digest(1000 * version + rank) for rank in range(ranks)), "all-in",
    )  # fmt: skip


def roster(
    number: int,
    racks: Iterable[int],
    ranks: int = 1,
    *,
    non_voters: Sequence[int] = (),
    witness: bool = False,
    lives: Mapping[int, int] | None = None,
) -> Roster:
    """`lives`: of racks that were started again."""
    seats = tuple(seat(rack, ranks, (lives or {}).get(rack, 0)) for rack in racks)
    third = member(WITNESS) if witness else None
    return Roster(number, seats, tuple(non_voters), third, "a test")


def lineage(
    ballot: int,
    racks: Sequence[int],
    dead: Sequence[int] = (),
    versions: Sequence[int] = (0,),
    *,
    number: int = 1,
    witness: bool = False,
) -> Lineage:
    """Its result of version v has the digest 1000 v, as that of `commit`, also at version 0."""
    return Lineage(
        ballot, number, tuple(seat(rack) for rack in racks), (),
        member(WITNESS) if witness else None,
        tuple(member(rack) for rack in dead), tuple(versions),
        tuple((digest(1000 * version),) for version in versions), "a test",
        tuple(WHOLE * version for version in versions),
    )  # fmt: skip


def log_of(*records: Record, kept: int = RECORDS_KEPT) -> Log:
    log = Log(kept)
    for record in records:
        log.append(record)
    return log


def acceptor_state(last: int = 0, decided: int = 0, ballot: int = FIRST) -> AcceptorState:
    """Of a voter that follows the coordinator of `ballot`."""
    return AcceptorState(ballot, ballot, last, decided, last, "", ())


def report(serial: int, fragments: int = 1, **changes: Any) -> Report:
    """A rack that has just begun: it holds version 0 and nothing else happened."""
    fields: dict[str, Any] = {
        "to": member(0).incarnation,
        "acceptor_state": acceptor_state(ballot=0), "fresh": True, "step": 0, "step_ns": 0,
        "versions": (0,) * fragments, "offers": (), "declined": (), "coming": (), "got": (),
        "held": (), "leaving": False, "hurry": False, "idle": False, "gone": False,
    }  # fmt: skip
    return Report(serial=serial, **{**fields, **changes})


def orders(serial: int, records: Sequence[Record] = (), /, **changes: Any) -> Orders:
    """Of rack 0 to rack 1: a whole log of `records`, all of them decided."""
    log = log_of(*records)
    fields: dict[str, Any] = {
        "to": member(1).incarnation, "ballot": FIRST, "lineage": log.lineage,
        "prev": 0, "chain": "", "records": tuple(records),
        "last": len(records), "decided": len(records),
        "offers": (), "proposals": (), "settled": (), "live": (), "missing": (), "why": (),
    }  # fmt: skip
    return Orders(serial=serial, **{**fields, **changes})


def rank_report(serial: int, fragments: int = 1, **changes: Any) -> RankReport:
    fields: dict[str, Any] = {
        "step": 0, "step_ns": 0, "decided": 0, "versions": (0,) * fragments, "parts": (),
        "got": (), "held": (), "partials": (), "leaving": False, "hurry": False, "idle": False,
    }  # fmt: skip
    return RankReport(serial=serial, **{**fields, **changes})


def rank_orders(serial: int, records: Sequence[Record] = (), **changes: Any) -> RankOrders:
    fields: dict[str, Any] = {
        "prev": 0, "records": tuple(records), "offers": (), "proposals": (), "totals": (),
        "settled": (), "live": (), "discarded": (), "why": (), "failure": ("", ""), "finish": False,
    }  # fmt: skip
    return RankOrders(serial=serial, **{**fields, **changes})


def sent(effects: Iterable[Effect], to: Peer | None = None) -> list[Message]:
    """Bodies of the messages among the effects, to one peer or to all."""
    return [e.body for e in effects if isinstance(e, Send) and to in (None, e.to)]


def notes(effects: Iterable[Effect], kind: str) -> list[dict[str, object]]:
    noted = pairs(effect.event for effect in effects if isinstance(effect, Note))
    return [fields for found, fields in noted if found == kind]
