"""Checks I4, how a job must end: no rank hangs, and where a quorum can go on, it has gone on.

Where all racks are alive at the end, in whatever life, the job must go on too, as a restart attests
the end of the former life.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mend.errors import Diverged, GaveUp, Refused, StartTimeout
from mend.events.kinds import LeftAlone, RackSilent, StateFresh
from mend.types import SECOND, WITNESS, Peer
from mend_lab.sim.agreement import is_held, is_seated
from mend_lab.sim.faults import SPOILT, target
from mend_lab.sim.scenario import SHUTDOWN_NS
from mend_lab.sim.scripted_faults import VOTES_NS

if TYPE_CHECKING:
    from mend_lab.sim.process import Training
    from mend_lab.sim.world import World

CONVERGED_NS = 15 * SECOND
"""Limit from the end of all faults and of all training to the end of the job."""

NO_COPY = "no rack gave a copy"
"""In the reason of a rank that waited for a training state until its limit."""

FOUND_NS = 9 * SECOND
"""Time to notice a lost quorum, to begin a new lineage, and for all to join it."""


def verdict(world: World, finished: bool) -> list[str]:
    """The problems of the way this job ended, as sentences."""
    problems = []
    if not finished:
        stuck = [p for p, t in world.trainings.items() if not t.ended and not t.process.dead]
        problems.append(f"{_names(stuck)} did not end")
    for peer, training in world.trainings.items():
        if isinstance(training.failure, Diverged) and peer.rack not in _may_diverge(world):
            problems.append(f"{_names([peer])}, which is healthy, has {training.failure!r}")
        if training.failure is None or training.process.dead or _excused(world, peer, training):
            continue
        problems.append(f"{_names([peer])} failed: {training.failure!r}")
    if finished and not problems and all_back(world):
        problems += _not_back(world)
    if finished and not problems and (_must_converge(world) or all_back(world)):
        problems += _not_converged(world) + _without_state(world)
    return problems


def _may_diverge(world: World) -> set[int]:
    """Racks whose weights or payloads the scenario spoils."""
    scenario = world.scenario
    spoilt = {fault.a for fault in scenario.faults if fault.kind in SPOILT}
    return spoilt | {rack for rack, _ in scenario.non_finite}


def all_back(world: World) -> bool:
    """Whether every rack is alive or retired at the end, some were started again while the others
    trained, and all had the time to find each other. Then the job must have gone on."""
    scenario = world.scenario
    patient = scenario.quiet_ns > 0 and scenario.shutdown_ns > SHUTDOWN_NS
    retired = {fault.a for fault in scenario.faults if fault.kind == "retire"}
    dead = {t.process.me.rack for t in world.trainings.values() if t.process.dead}
    if not patient or scenario.lockstep or not dead <= retired:
        return False
    again = {process.me.rack for process in world.past} | dead
    if world.witness is not None and (world.witness.dead or not _witness_was_back(world, again)):
        return False  # nothing attests its death where its vote is needed; or nobody founds
    stayed = [t for peer, t in world.trainings.items() if peer.rack not in again]
    since_ns = scenario.quiet_ns + FOUND_NS
    return bool(again) and all(not t.trained_ns or t.trained_ns > since_ns for t in stayed)


def _witness_was_back(world: World, again: set[int]) -> bool:
    """Whether a witness that was started again had its vote back before a rack died."""
    if WITNESS not in again or again == {WITNESS}:
        return True
    restarts = [fault for fault in world.scenario.faults if fault.kind == "restart"]
    back_ns = max((f.end_ns for f in restarts if f.a == target(WITNESS)), default=0) + VOTES_NS
    died = [f.begin_ns >= back_ns for f in restarts if f.a != target(WITNESS)]
    return all(died) and not any(fault.after for fault in restarts)


def _not_back(world: World) -> list[str]:
    """Every rack must have had a seat in its last life."""
    rosters = world.checkers.agreement.rosters
    lost = [
        peer
        for peer, training in world.trainings.items()
        if training.failure is None
        and not any(is_seated(training.process, roster) for roster in rosters)
    ]
    problems = [f"{_names(lost)} lives again and never got a seat"] if lost else []
    witness = world.witness
    if witness is not None and not any(is_seated(witness, roster) for roster in rosters):
        problems.append("the witness lives again and never got its seat")
    return problems


def _excused(world: World, peer: Peer, training: Training) -> bool:
    """Whether the faults of the scenario explain this failure."""
    if isinstance(training.failure, Diverged):
        return peer.rack in _may_diverge(world)
    if isinstance(training.failure, Refused):  # it came back when the job was over
        over = not world.checkers.agreement.rosters[-1].racks
        return over and any(process.me == peer for process in world.past)
    broken = bool(world.scenario.faults) or world.scenario.loss > 0
    return broken and not all_back(world) and isinstance(training.failure, GaveUp | StartTimeout)


def _must_converge(world: World) -> bool:
    """Whether the surviving racks can decide, and had the time for it.

    They are a quorum of the newest roster, and enough for K. A rack whose bytes a quorum needs and
    cannot have loses its vote.
    """
    scenario, rosters = world.scenario, world.checkers.agreement.rosters
    broken = bool(scenario.faults) or scenario.loss > 0
    patient = scenario.shutdown_ns > SHUTDOWN_NS
    if len(rosters) == 1 or (broken and not patient) or (scenario.faults and not scenario.quiet_ns):
        return False
    seating = next(each for each in reversed(rosters) if each.racks)
    everybody = [*world.processes(), *world.past]
    seated = [process for process in everybody if is_seated(process, seating)]
    alive = {p.me.rack for p in seated} - {p.me.rack for p in seated if p.dead}
    racks = alive - {WITNESS}
    decide = seating.may_decide(alive)
    if scenario.lockstep:  # no vote is taken from those whose bytes hold the others up
        decide = decide and is_held(racks, seating.voters)
    return decide and len(racks) >= min(scenario.k, len(seating.racks))


def _not_converged(world: World) -> list[str]:
    problems, versions = [], {}
    patient = world.scenario.shutdown_ns > SHUTDOWN_NS
    seating = next(each for each in reversed(world.checkers.agreement.rosters) if each.racks)
    live = {
        peer: training
        for peer, training in world.trainings.items()
        if is_seated(training.process, seating)
        and not training.process.dead
        and not isinstance(training.failure, Diverged)  # its script ends there, as it must
        and not _left_behind(world, training)
    }
    for peer, training in live.items():
        versions[peer] = tuple(state.anchor.version for state in training.trainer.fragment_states)
        left = [event for event in training.process.notes if isinstance(event, LeftAlone)]
        if left and (patient or _even(world)):
            problems.append(
                f"{_names([peer])} left alone though a quorum was there: {left[-1].sentence()}"
            )
        open_ = [
            p for p, state in enumerate(training.trainer.fragment_states) if state.offer is not None
        ]
        if open_ and patient:
            problems.append(f"{_names([peer])} ended with open offers of fragments {open_}")
    if len(set(versions.values())) > 1 and (patient or _even(world)):
        ends = "; ".join(f"{_names([peer])} at {v}" for peer, v in versions.items())
        problems.append(f"the racks ended at different versions: {ends}")
    # Also of racks that the others missed once: they wait for them as long as these train.
    still = [training for training in world.trainings.values() if not training.process.dead]
    trained_ns = max((training.trained_ns for training in still), default=0)
    ended_ns = max((training.ended_ns for training in live.values()), default=0)
    took_ns = ended_ns - max(trained_ns, world.scenario.quiet_ns)
    if took_ns > CONVERGED_NS:
        problems.append(f"the end took {took_ns / SECOND:.1f} s")
    return problems


def _without_state(world: World) -> list[str]:
    """Ranks that waited for a copy of another rack's training state until their limit. Where nobody
    can give one, they hear so at once."""
    waited = [
        peer
        for peer, training in world.trainings.items()
        for event in training.process.notes
        if isinstance(event, StateFresh) and NO_COPY in event.reason
    ]
    return [f"{_names(waited)} joined, and got no copy of a training state"] if waited else []


def _left_behind(world: World, training: Training) -> bool:
    """Whether the others missed this rack and ended the job, as they may; it keeps its work."""
    rack = training.process.me.rack
    missed = any(
        isinstance(event, RackSilent) and event.peer == rack
        for other in world.trainings.values()
        for event in other.process.notes
    )
    return missed and training.rank.published.finished


def _even(world: World) -> bool:
    """Whether all racks train equally long, and no rack pauses longer than the others wait at their
    end: then no wait times out."""
    scenario = world.scenario
    apart_ns = max(scenario.paused_ns) - min(scenario.paused_ns)
    equal = len(set(scenario.steps)) == 1 and len(set(scenario.step_ns)) == 1
    return equal and apart_ns < scenario.shutdown_ns


def _names(peers: list[Peer]) -> str:
    return ", ".join(f"rack {peer.rack} rank {peer.rank}" for peer in peers)
