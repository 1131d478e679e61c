"""The inputs of a round, collected from the log and the newest reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from mend.consensus.log import NORMS_KEPT, LogState
from mend.consensus.quorum import hold
from mend.consensus.records import Absent, Offer
from mend.coordination.donors import waiting_for_state
from mend.coordination.messages import OfferId, Report, Sliced
from mend.coordination.round import RoundInputs
from mend.coordination.unit_grants import racks_without_rows
from mend.errors import require
from mend.types import Member

ABSURD = 1e4
"""Limit of an offer's magnitude per step, as a multiple of the median of what was merged before.
Training never moves that suddenly."""

HARMLESS = 1e-4
"""Magnitude per step below which no offer is rejected. A job that has converged moves by the
rounding of its weights, or in most rounds by next to nothing: an fp32 weight of 1,000 has its
neighbour 6e-5 away."""

NORMS_MIN = 8
"""Number of named offers that are needed before a new one is compared with them."""

NAMED_LATELY_MIN = 4
"""Versions for which a rack counts as taking part after it was named, or twice the number of racks
if that is more, because racks may take turns. So a rack that never gets into a merge does not
reduce the steps of the others forever. A job is young until this many offers were named."""

Offers = Mapping[tuple[int, int], Offer]
"""(rack, fragment) -> the rack's open offer."""


def surroundings(
    log: LogState, reports: Mapping[int, Report], offers: Offers, live: frozenset[int]
) -> RoundInputs:
    """The part of the inputs that all rounds share; `inputs_of` adds the round's own part."""
    policy = require(log.policy, "rounds begin after the first record")
    live &= log.seats.keys()
    # A rack that still copies decided versions, or waits for a donor's state, offers nothing and is
    # not waited for.
    newcomers = log.non_voters - log.demoted | waiting_for_state(reports)
    newcomers -= {rack for rack, _ in offers}
    leaving = {rack for rack, report in reports.items() if report.leaving and report.idle}
    return RoundInputs(
        version=0,
        voters=frozenset([member.rack for member in log.voters]),
        policy=policy,
        offers=(),
        arrived=(),
        declined=frozenset(),
        contributors=frozenset(log.seats) - newcomers - leaving,
        live=live,
        held={},
        step_ns=fastest_ns([report.step_ns for rack, report in reports.items() if rack in live]),
        seats=len(log.seats),
        mitigated=log.mitigated,
        without_rows=racks_without_rows(log, reports, live),
    )


def asked_fragments(reports: Mapping[int, Report], offers: Offers) -> set[int]:
    """Fragments that some rack has offered or declined."""
    declined = {each.fragment for report in reports.values() for each in report.declined}
    return declined | {fragment for _, fragment in offers}


def fastest_ns(times_ns: Sequence[int]) -> int:
    """The shortest time per step; 0 before there is one. The fastest rack needs the result first: a
    window that suits a slower rack would stall it."""
    return min((time_ns for time_ns in times_ns if time_ns > 0), default=0)


def inputs_of(
    fragment: int,
    around: RoundInputs,
    log: LogState,
    reports: Mapping[int, Report],
    offers: Offers,
    holders: Mapping[OfferId, Set[int]],
) -> RoundInputs:
    """The inputs of one round: its offers, which of them are held, which racks declined, and the
    results."""
    version, racks = log.versions[fragment], sorted(log.seats)
    of_weights = fragment < around.policy.of_weights  # other values do not grow with the steps
    open_offers = tuple([offers[(rack, fragment)] for rack in racks if (rack, fragment) in offers])
    arrived = [
        offer
        for offer in open_offers
        if version - offer.base <= around.policy.staleness_max_rounds
        and _is_held(offer, around, holders)
    ]
    declined, results, bad = set(), {}, []
    slices = dict[int, Sliced]()
    for rack in racks:
        if (report := reports.get(rack)) is None:
            continue
        for each in report.declined:
            if each.fragment == fragment and each.applied == version:
                declined.add(rack)
        if report.bad:
            bad.append(report)
        for result in report.held:
            if (result.fragment, result.version) == (fragment, version + 1):
                results[rack] = (result.attempt, result.digests)
        if report.slices and (sliced := _slice_of(report, fragment, version + 1)):
            slices[rack] = sliced
    works, coming, named = _works(fragment, log, reports, offers)
    lasts = _lasts(fragment, log)
    return RoundInputs(  # not `replace`: the most frequent call of a simulation
        version=version,
        voters=around.voters,
        policy=around.policy,
        offers=open_offers,
        arrived=tuple(arrived),
        declined=frozenset(declined),
        contributors=around.contributors - _done_with(fragment, around, reports, offers),
        live=around.live,
        held=results,
        bad=_found_bad(fragment, open_offers, bad),
        norm_max=norm_max(log.norms[fragment]) if arrived and of_weights else math.inf,
        step_ns=around.step_ns,
        seats=around.seats,
        mitigated=around.mitigated,
        without_rows=_resting(fragment, around, reports, offers),
        slices=slices,
        works=works,
        lasts=lasts,
        coming=frozenset(coming),
        named=named,
    )


def _is_held(offer: Offer, around: RoundInputs, holders: Mapping[OfferId, Set[int]]) -> bool:
    """Whether the bytes of an offer will be available once the members are fixed. In sharded rounds
    they are pulled only then, so the offering rack has to be live; in lockstep it is awaited."""
    own, policy = offer.member.rack, around.policy
    if policy.sharded and (policy.lockstep or own in around.live):
        return True
    has = holders.get(OfferId(offer.member, offer.fragment, offer.seq), frozenset())
    return hold(around.live & {*has, own}, around.voters)


def _slice_of(report: Report, fragment: int, version: int) -> Sliced | None:
    """The rack's progress in the newest sharded attempt at a version that it has heard of."""
    slices = [s for s in report.slices if (s.fragment, s.version) == (fragment, version)]
    return max(slices, key=lambda s: s.attempt, default=None)


def _works(
    fragment: int, log: LogState, reports: Mapping[int, Report], offers: Offers
) -> tuple[dict[int, Absent], set[int], dict[int, tuple[int, int]]]:
    """`works`, `coming` and `named` of a round. A rack weighs as its open offer or its last named
    one; as everything that it has trained since then, if that is more. Its work is still to come
    while it trains, if it was named recently or the job is young; while it leaves, only an open
    offer counts."""
    works, coming, named = dict[int, Absent](), set[int](), dict[int, tuple[int, int]]()
    version, lately = log.versions[fragment], max(NAMED_LATELY_MIN, 2 * len(log.seats))
    young = len(log.norms[fragment]) < min(lately, NORMS_KEPT)
    for rack, seat in log.seats.items():
        if (report := reports.get(rack)) is None:
            continue
        key = (seat.member, fragment)
        captured, counts = -1, young
        if key in log.named:
            (_, last), (captured, tokens, steps, base) = log.named[key], log.work[key]
            named[rack], counts = (base, last), version - last < lately
            if (since := report.step - captured) > steps > 0:
                # Its next offer has all steps since its last one, which are more.
                tokens, steps = tokens * since // steps, since
            works[rack] = Absent(rack, tokens, steps, report.leaving)
        if offer := offers.get((rack, fragment)):
            works[rack] = Absent(rack, offer.tokens, offer.steps, report.leaving)
        if report.leaving:
            counts = offer is not None or fragment in report.coming
        if counts and report.step > captured:
            coming.add(rack)
    return works, coming, named


def _lasts(fragment: int, log: LogState) -> dict[int, Absent]:
    """Weight of each rack's last named offer."""
    keys = {rack: (seat.member, fragment) for rack, seat in log.seats.items()}
    works = {rack: log.work[key] for rack, key in keys.items() if key in log.named}
    return {rack: Absent(rack, tokens, steps) for rack, (_, tokens, steps, _) in works.items()}


def _found_bad(
    fragment: int, offers: Sequence[Offer], reports: Sequence[Report]
) -> dict[tuple[Member, int], str]:
    """Offers that some rack refuses to merge. One report is enough, because the rack has verified
    the checksum of the bytes. The lowest rack that refuses gives the reason."""
    reasons: dict[tuple[Member, int], str] = {}
    if not reports:
        return reasons
    open_ = {(offer.member, offer.seq) for offer in offers}
    for report in reports:
        for bad in report.bad:
            name = (bad.offer.member, bad.offer.seq)
            if bad.offer.fragment == fragment and name in open_:
                reasons.setdefault(name, bad.reason)
    return reasons


def norm_max(recent: Sequence[float]) -> float:
    """Magnitude per step from which on an offer is implausible; infinite while too little is known,
    or if most known offers did not move."""
    if len(recent) < NORMS_MIN:
        return math.inf
    usual = sorted(recent)[len(recent) // 2]
    return max(ABSURD * usual, HARMLESS) if usual > 0 else math.inf


def _done_with(
    fragment: int, around: RoundInputs, reports: Mapping[int, Report], offers: Offers
) -> set[int]:
    """Racks that are leaving and will offer nothing more of the fragment. Waiting for K of them
    could last forever if each had an offer of another fragment that waits for the rest. In lockstep
    all are waited for."""
    if around.policy.lockstep:
        return set()
    return {
        rack
        for rack in around.contributors
        if (report := reports.get(rack)) is not None
        and report.leaving
        and (rack, fragment) not in offers
        and fragment not in report.coming
    }


def _resting(
    fragment: int, around: RoundInputs, reports: Mapping[int, Report], offers: Offers
) -> frozenset[int]:
    """Racks without rows that have no offer of the fragment under way."""
    return frozenset(
        rack
        for rack in around.without_rows
        if (rack, fragment) not in offers and fragment not in reports[rack].coming
    )


def settled_versions(reports: Sequence[Report | None], fragments: int) -> tuple[int, ...]:
    """Per fragment the version that every live rack holds; -1 until all of them have reported
    it."""
    known = [report.versions if report else () for report in reports]
    return tuple(
        [min([v[p] if p < len(v) else -1 for v in known], default=-1) for p in range(fragments)]
    )
