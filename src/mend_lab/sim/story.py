"""Describes a run in sentences: the job, the events in order, and the problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mend.events import kinds
from mend.events.base import LoggedEvent
from mend.types import MS, SECOND, Peer
from mend_lab.sim.faults import name_of, sentence, target
from mend_lab.sim.scenario import Scenario, python_of

if TYPE_CHECKING:
    from mend_lab.sim.world import SimulationReport, World

LINES_MAX = 60
"""Limit on the lines about events; more are cut in the middle."""

PROBLEMS_MAX = 6
TEXT_MAX = 400


def setup(scenario: Scenario) -> str:
    """The job in a few sentences, and its faults."""
    s = scenario
    ranks = "one rank each" if s.ranks == 1 else f"{s.ranks} ranks each"
    witness = "with a witness" if s.witness else "without a witness"
    grace = "adaptive grace" if s.grace_ns < 0 else f"{s.grace_ns // MS} ms of grace"
    closing = "in lockstep" if s.lockstep else f"K = {s.k}, {grace}"
    rise = f" rising over {s.overlap_ramp} rounds" if s.overlap_ramp else ""
    overlap = "" if s.overlapped else ", blocking"
    lines = [
        f"Seed {s.seed}. {s.racks} racks, {ranks}, {witness}; P = {s.fragments} fragments, "
        f"H = {s.period_steps} steps, tau = {s.overlap_steps}{rise}, {closing}, "
        f"staleness_max_rounds = {s.staleness_max_rounds}; {s.apply_mode}, {s.merge}, "
        f"{s.payload}{overlap}.",
        f"The racks train {_each(s.steps)} steps of {_each([ns // MS for ns in s.step_ns])} ms. "
        f"A frame takes {s.delay_ns // MS} to {(s.delay_ns + s.jitter_ns) // MS} ms; "
        f"{100 * s.loss:.0f} % are lost, {100 * s.duplicate:.0f} % doubled.",
    ]
    lines += [f"Rack {rack} computes a NaN in step {step}." for rack, step in s.non_finite]
    if s.first:
        lines.append(f"The job begins with version {s.first} of every fragment, from a checkpoint.")
    if s.cut_step:
        lines.append(f"All racks make a checkpoint after step {s.cut_step}.")
    lines += [
        f"After step {step} rack {rack} does something else for {ns / SECOND:.1f} s."
        for rack, step, ns in s.pauses
    ]
    lines += [_capital(sentence(fault, s)) + "." for fault in s.faults]
    if s.quiet_ns:
        lines.append(f"From {s.quiet_ns / SECOND:.2f} s on nothing is broken any more.")
    return "\n".join(lines)


def happened(world: World) -> list[str]:
    """The events of the job in order of time; equal events of several ranks or fragments once."""
    events = [(when_ns, text) for when_ns, text in world.broken.struck]
    read: dict[str, int] = {}
    processes = [*world.past, *world.processes()]
    for process in processes:
        for when_ns, event in zip(process.noted_ns, process.notes, strict=True):
            if isinstance(event, kinds.RoundCommitted):  # every rank reads it; the first one counts
                text = _commit(event)
                read[text] = min(read.get(text, when_ns), when_ns)
            elif text := _event(process.me, event):
                events.append((when_ns, text))
    events += [(when_ns, text) for text, when_ns in read.items()]
    lines = [f"{when_ns / SECOND:8.3f} s  {text}" for when_ns, text in sorted(set(events))]
    if len(lines) > LINES_MAX:
        half = LINES_MAX // 2
        left_out = len(lines) - 2 * half
        lines[half:-half] = [f"            ... {left_out} lines left out; --trace has them all ..."]
    return lines


QUIET = (
    kinds.VersionApplied,
    kinds.FragmentCaptured,
    kinds.RoundDecided,
    kinds.HelloHeard,
    kinds.OfferStillOpen,
    kinds.VersionCopied,
    kinds.ProcessStarted,
)
"""Events that would only be noise."""


def _event(me: Peer, event: LoggedEvent) -> str:
    """An event as a sentence; empty: it is left out."""
    leads, who = me.rank == 0, name_of(target(me.rack))
    if isinstance(event, QUIET):
        return ""
    if isinstance(event, kinds.RackSilent | kinds.RackBack) and not leads:
        return ""
    return f"{who}: {_cut(event.sentence())}"


def _commit(event: kinds.RoundCommitted) -> str:
    members = _list([member.rack for member in event.members])
    ended = [each.rack for each in event.dropped]
    dropped = f", offers of racks {_list(ended)} are dropped" if ended else ""
    return (
        f"fragment {event.fragment} version {event.version} is decided: offers of racks {members} "
        f"({event.reason}){dropped}"
    )


def tell(world: World, report: SimulationReport) -> str:
    """The whole story of a run, its end, and the code that repeats it."""
    seconds = report.virtual_ns / SECOND
    end = [f"After {seconds:.2f} virtual seconds and {report.commits} commits:"]
    problems = list(dict.fromkeys(report.problems))
    end += [f"  broken: {_cut(problem)}" for problem in problems[:PROBLEMS_MAX]]
    if len(problems) > PROBLEMS_MAX:
        end.append(f"  and {len(problems) - PROBLEMS_MAX} more, which may follow from these.")
    if not report.problems:
        end.append("  every invariant held.")
    again = [
        "To have it again:",
        "  from mend_lab.sim import Fault, Scenario, World",
        f"  World({python_of(report.scenario)}).run()",
    ]
    return "\n".join([setup(report.scenario), "", *happened(world), "", *end, "", *again])


def _each(values: tuple[int, ...] | list[int]) -> str:
    """One number if all are equal, else all of them."""
    return str(values[0]) if len(set(values)) == 1 else ", ".join(map(str, values))


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
