"""Checks well-formed messages against the job. Each check returns an error text, or an empty
string.

`wire` has checked types and limits. Here sizes and indices are compared with the plan, so that no
machine indexes with an unchecked number from the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mend.consensus.ballots import count_of
from mend.consensus.records import (
    CHECKSUM_BYTES,
    RECORDS_FORMAT,
    Commit,
    Drop,
    Genesis,
    Last,
    Lineage,
    Offer,
    Policy,
    Record,
    Roster,
    Snapshot,
    filled_fields,
)
from mend.coordination.messages import (
    CapturePart,
    Declined,
    Hello,
    MergeProposal,
    OfAttempt,
    OfferId,
    Orders,
    RankOrders,
    RankReport,
    Report,
    StateCopy,
)
from mend.types import Member

Fact = tuple[str, str]

PARAMETER = "param "
"""Prefix of the facts of parameters."""

DERIVED = "shards of rank "
"""Prefix of the facts that are digests of others."""

NAMED_MAX = 8
"""Limit of the differences that a refusal names."""

_AVERAGED = "momentum_sync_period_steps, second_moment_sync_period_steps, exchange_statistics"


class Difference(NamedTuple):
    """A fact of a hello that differs from the job's."""

    name: str
    there: str
    here: str

    def for_sender(self) -> str:
        """Text for the sender of the hello, which may be a stranger: it does not name the right
        value."""
        return f"{self.name} is {self.there} there and not here"

    def for_log(self) -> str:
        """Text for the local log."""
        return f"{self.name} is {self.there} there and {self.here} here"


def describe(found: Sequence[Difference]) -> tuple[str, str]:
    """(text for the sender, text for the log) of at least one difference."""
    shown, more = found[:NAMED_MAX], len(found) - NAMED_MAX
    tail = [f"and {more} more"] if more > 0 else []
    sides = ([d.for_sender() for d in shown], [d.for_log() for d in shown])
    to_sender, to_log = ("; ".join([*side, *tail]) for side in sides)
    return to_sender, to_log


def hello_misfit(hello: Hello, racks: int) -> str:
    """For the coordinator: why a rack cannot be seated."""
    ranks, fragments = hello.policy.ranks, hello.policy.fragments
    if hello.policy.racks != racks:
        both = f"it is configured for racks={hello.policy.racks}, this job for racks={racks}"
        return f"{both}: give every rack and the witness the same racks (MEND_RACKS)"
    if len(hello.seat.lanes) != ranks:
        return f"it has {len(hello.seat.lanes)} lanes for {ranks} ranks"
    if len(hello.digests) != fragments or any(len(digests) != ranks for digests in hello.digests):
        return "it has not one digest per fragment and rank"
    if hello.policy.of_weights < 1:
        return f"it has no fragment of weights among {fragments}"
    resume, units = hello.resume, hello.policy.units * hello.policy.epochs
    if resume and {len(resume.versions), len(resume.rounds)} != {fragments}:
        return f"its checkpoint has {len(resume.versions)} versions for {fragments} fragments"
    if resume and (resume.units.total if resume.units else 0) != units:
        return "its checkpoint is of another data ledger"
    return ""


def report_misfit(report: Report, member: Member, policy: Policy) -> str:
    """For the coordinator: how a report does not fit the job's plan."""
    ranks, fragments = policy.ranks, policy.fragments
    if len(report.versions) != fragments:
        return f"{len(report.versions)} versions for {fragments} fragments"
    if any(offer.member != member for offer in report.offers):
        return "an offer in the name of another rack"
    if any(len(held.digests) != ranks for held in report.held):
        return "a result without one digest per rank"
    if any(copy.donor != member for copy in report.copies):
        return "a copy in the name of another rack"
    bad = [bad.offer for bad in report.bad]
    return (
        _copies_misfit(report.copies, ranks)
        or _offers_misfit(report.offers, fragments, ranks)
        or _fragments_misfit([*report.declined, *report.held, *bad, *report.slices], fragments)
    )


def rank_report_misfit(report: RankReport, fragments: int) -> str:
    """For a leader: how a report does not fit its plan."""
    if len(report.versions) != fragments:
        return f"{len(report.versions)} versions for {fragments} fragments"
    if any(len(held.digests) != 1 for held in report.held):
        return "a result without its digest"
    if any(len(part.checksum) not in (0, 2 * CHECKSUM_BYTES) for part in report.parts):
        return "a part with a checksum of another length"
    bad = [bad.offer for bad in report.bad]
    of_attempts = (*report.held, *report.partials, *report.slices)
    return _fragments_misfit([*report.parts, *of_attempts, *bad], fragments)


def orders_misfit(orders: Orders, hello: Hello, begun: bool) -> str:
    """For a leader: how orders do not fit its plan."""
    ranks, fragments = hello.policy.ranks, hello.policy.fragments
    first = orders.records[0] if orders.records and orders.prev == 0 else None
    if first is not None and not begun and not isinstance(first, Genesis):
        return "a log that does not begin with Genesis"
    return (
        format_misfit(orders.records)
        or _snapshot_misfit(orders.snapshot, orders.prev, fragments, ranks)
        or _records_misfit(orders.records, fragments, ranks)
        or _offers_misfit(orders.offers, fragments, ranks)
        or _proposals_misfit(orders.proposals, fragments, ranks)
        or _copies_misfit(orders.copies, ranks)
    )


def format_misfit(records: Iterable[Record]) -> str:
    """How records have a format that this version of mend cannot read."""
    for record in records:
        if isinstance(record, Genesis) and record.format != RECORDS_FORMAT:
            return f"a log of format {record.format}, this mend reads format {RECORDS_FORMAT}"
    return ""


def rank_orders_misfit(orders: RankOrders, fragments: int, ranks: int) -> str:
    """For a rank: how orders do not fit its plan."""
    return (
        _snapshot_misfit(orders.snapshot, orders.prev, fragments, ranks)
        or _records_misfit(orders.records, fragments, ranks)
        or _offers_misfit(orders.offers, fragments, ranks)
        or _proposals_misfit(orders.proposals, fragments, ranks)
        or _numbers_misfit((fragment for fragment, _ in orders.discarded), fragments)
        or _fragments_misfit(orders.totals, fragments)
        or _copies_misfit((orders.copy,) if orders.copy else (), ranks)
    )


def _snapshot_misfit(snapshot: Snapshot | None, prev: int, fragments: int, ranks: int) -> str:
    if snapshot is None:
        return ""
    if snapshot.format != RECORDS_FORMAT:
        return f"a snapshot of format {snapshot.format}, this mend reads {RECORDS_FORMAT}"
    if snapshot.index != prev or not snapshot.lineages:
        return f"a snapshot of record {snapshot.index} in place of {prev}"
    each = (snapshot.versions, snapshot.digests, snapshot.norms, snapshot.rounds)
    if any(len(values) != fragments for values in each) or min(snapshot.versions) < 0:
        return "a snapshot of another plan"
    if snapshot.checkpoint is not None and len(snapshot.checkpoint_versions) != fragments:
        return f"a snapshot whose checkpoint has {len(snapshot.checkpoint_versions)} versions"
    lists: list[tuple[object, ...]] = [seat.lanes for seat in snapshot.members]
    if any(len(values) != ranks for values in [*lists, *snapshot.digests]):
        return "a snapshot with other numbers of ranks"
    return _fragments_misfit(snapshot.last, fragments)


def _records_misfit(records: Iterable[Record], fragments: int, ranks: int) -> str:
    return next((m for record in records if (m := _record_misfit(record, fragments, ranks))), "")


def _record_misfit(record: Record, fragments: int, ranks: int) -> str:
    match record:
        case Genesis(digests=digests, versions=versions, rounds=rounds):
            begins = (len(versions), len(rounds)) in ((0, 0), (fragments, fragments))
            fits = len(digests) == fragments and all(len(each) == ranks for each in digests)
            if not (begins and fits) or min(versions, default=0) < 0:
                return "a Genesis of another plan"
        case Commit(fragment=fragment, digests=digests):
            if fragment >= fragments or len(digests) != ranks:
                return f"a Commit of fragment {fragment} with {len(digests)} digests"
        case Lineage(versions=versions, digests=digests, rounds=rounds):
            fits = len(versions) == len(digests) == len(rounds) == fragments
            if not fits or any(len(each) != ranks for each in digests):
                return "a Lineage of another plan"
        case Drop(fragment=fragment):
            if fragment >= fragments:
                return f"a Drop of fragment {fragment}"
    seats = record.roster if isinstance(record, Genesis) else ()
    seats = record.members if isinstance(record, Roster | Lineage) else seats
    if any(len(seat.lanes) != ranks for seat in seats):
        return f"a {type(record).__name__} with other numbers of ranks"
    return ""


def resume_misfit(hello: Hello, others: Iterable[Hello]) -> tuple[str, str] | None:
    """For the founder: why this rack cannot begin with the others: (text for the rack, text for the
    local log with the right value). All begin with the same checkpoint; a rack without a part of it
    begins with a copy."""
    first = next((other for other in others if other.resume is not None), None)
    if first is None or first.resume is None:
        return None
    theirs, own, rack = first.resume, hello.resume, f"rack {first.seat.member.rack}"
    right = f"{rack} resumes checkpoint {theirs.number} of lineage {theirs.lineage[:12]}"
    if own is None:
        if not hello.policy.lockstep:
            if hello.part_lost or hello.seat.member.rack not in theirs.racks:
                return None
            why = (
                "it resumes no checkpoint, and has a part of the one that the others resume; pass "
                "resume= on every rack (with the folder of another rack it begins with a copy, and "
                "what only it had is lost)"
            )
            return why, f"{why}; {right}"
        why = "it resumes no checkpoint; in lockstep all racks begin at one step"
        return why, f"{why}, and {right}"
    if (own.lineage, own.number) != (theirs.lineage, theirs.number):
        why = f"it resumes checkpoint {own.number} of lineage {own.lineage[:12]}"
        return f"{why}, {rack} another one", f"{why}, {right}"
    if own != theirs or hello.digests != first.digests:
        why = f"its part of the checkpoint is of versions {own.versions}, or damaged"
        return f"{why}; {rack} has another one", f"{why}; {right} at versions {theirs.versions}"
    if hello.policy.lockstep and hello.resume_step != first.resume_step:
        why = f"it resumes the checkpoint at step {hello.resume_step}"
        return f"{why}, {rack} at another one", f"{why}, {right} at step {first.resume_step}"
    return None


def _offers_misfit(offers: Iterable[Offer], fragments: int, ranks: int) -> str:
    for offer in offers:
        if offer.fragment >= fragments or len(offer.checksums) != CHECKSUM_BYTES * ranks:
            size = len(offer.checksums)
            return f"an offer of fragment {offer.fragment} with checksums of {size} bytes"
        if len(offer.sizes) not in (0, ranks):
            return f"an offer of fragment {offer.fragment} with {len(offer.sizes)} sizes"
    return ""


def _copies_misfit(copies: Iterable[StateCopy], ranks: int) -> str:
    for copy in copies:
        if not copy.refused and {len(copy.sizes), len(copy.digests)} != {ranks}:
            return f"a copy of {len(copy.sizes)} ranks, {len(copy.digests)} digests"
    return ""


def _proposals_misfit(proposals: Iterable[MergeProposal], fragments: int, ranks: int) -> str:
    for proposal in proposals:
        if proposal.fragment >= fragments or count_of(proposal.attempt) < 1 or not proposal.members:
            return f"a MergeProposal of fragment {proposal.fragment}, attempt {proposal.attempt}"
        if misfit := _offers_misfit(proposal.members, fragments, ranks):
            return misfit
        if any(offer.fragment != proposal.fragment for offer in proposal.members):
            return "a MergeProposal of offers of several fragments"
        racks = [offer.member.rack for offer in proposal.members]
        if racks != sorted(set(racks)):
            return f"a MergeProposal of racks {racks}, which do not ascend"
    return ""


def _fragments_misfit(
    values: Iterable[Declined | Last | OfAttempt | OfferId | CapturePart], fragments: int
) -> str:
    return _numbers_misfit((value.fragment for value in values), fragments)


def _numbers_misfit(numbers: Iterable[int], fragments: int) -> str:
    wrong = [number for number in numbers if number >= fragments]
    return f"fragment {wrong[0]} of {fragments}" if wrong else ""


def plan_hash(hello: Hello) -> str:
    """sha256 over the facts: identifies 'the same model, trained the same way'."""
    return hashlib.sha256(repr(hello.facts).encode()).hexdigest()


def differing(one: Iterable[Fact], other: Iterable[Fact]) -> list[str]:
    """Names of the facts that differ, in order; parameters that both have come late, because one
    parameter too many or too few moves others to other fragments, and digests of others last."""
    ours, theirs = dict(one), dict(other)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    moved = {name for name in ours.keys() & theirs.keys() if name.startswith(PARAMETER)}
    return sorted(names, key=lambda name: (_is_derived(name), name in moved))


def differences(lowest: Hello, other: Hello) -> list[Difference]:
    """The differences, each once. Parameters that both have, and digests of them, are included only
    if nothing else differs, because a setting or one parameter too many can move them all."""
    names = differing(lowest.facts, other.facts)
    ours, theirs = dict(lowest.facts), dict(other.facts)
    both = ours.keys() & theirs.keys()
    causes = [
        n for n in names if not _is_derived(n) and not (n.startswith(PARAMETER) and n in both)
    ]
    names = causes or names
    facts = [Difference(n, theirs.get(n, "absent"), ours.get(n, "absent")) for n in names]
    known = {difference.name for difference in facts}
    policies = policy_differences(lowest.policy, other.policy)
    return facts + [each for each in policies if each.name not in known]


def _is_derived(name: str) -> bool:
    return name.startswith(DERIVED)


def policy_differences(lowest: Policy, other: Policy) -> list[Difference]:
    """The settings in which the policies differ."""
    ours, theirs = _texts(lowest), _texts(other)
    return [
        Difference(name, theirs[name], ours[name]) for name in ours if theirs[name] != ours[name]
    ]


def _texts(policy: Policy) -> dict[str, str]:
    """Setting -> its value in a policy. Unequal policies have unequal texts."""
    filled = filled_fields().items()
    texts = {how.setting: how.text(getattr(policy, field)) for field, how in filled}
    averaged = [f"{each.period_steps} ({each.count} fragments)" for each in policy.moments]
    # Two fields make up this setting, and the setting does not count the fragments of moments.
    acts = "act" if policy.acts else "detect or validate"
    texts["failslow_action"] = "evict" if policy.evicts else acts
    texts["fragments"] = str(policy.of_weights)
    texts["ranks per rack"] = str(policy.ranks)
    texts["units of data"] = f"{policy.units} x {policy.epochs} epochs"
    texts[_AVERAGED] = ", ".join(averaged) or "none"
    return texts
