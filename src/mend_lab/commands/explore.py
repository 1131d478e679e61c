"""`python -m mend_lab explore`: visits all states of a small job, within bounds."""

from __future__ import annotations

import time

from rich.console import Console

from mend.errors import ConfigError
from mend_lab.commands.simulate import say
from mend_lab.sim.model_check import founding
from mend_lab.sim.model_check.explore import Explorer, Progress
from mend_lab.sim.model_check.founding import Bounds as Founding
from mend_lab.sim.model_check.state import NOBODY, Bounds

WITNESS_NAME = "witness"


def bounds_of(members: str, *, demotions: bool = False, **numbers: int) -> Bounds:
    """`members` as typed: racks ascending from 0, and the witness. Raises ConfigError."""
    racks, witness = _members_of(members)
    bounds = Bounds(racks=racks, witness=witness, demotions=demotions, **numbers)
    demoted, candidate = bounds.demoted, bounds.candidate
    for name, node, count in (
        ("demoted", demoted, racks),
        ("candidate", candidate, racks + witness),
    ):
        if not NOBODY <= node < count:
            raise ConfigError(name, node, "is not a member", "Give a member, or -1.")
    if demoted != NOBODY and not (demotions and witness and bounds.rosters > 0):
        remedy = "Also give --demotions, --rosters and a witness."
        raise ConfigError("demoted", demoted, "no roster can take its vote", remedy)
    return bounds


def founding_of(
    members: str, *, crashes: int, questions: int, ballots: int, rounds: int
) -> Founding:
    """Return the bounds of `--founding`. Raises ConfigError."""
    racks, witness = _members_of(members)
    return Founding(
        racks=racks,
        witness=witness,
        restarts=crashes,
        founds=questions,
        stands=ballots,
        commits=rounds,
    )


def _members_of(members: str) -> tuple[int, bool]:
    names = [name.strip() for name in members.split(",")]
    witness = names[-1] == WITNESS_NAME
    racks = names[:-1] if witness else names
    if racks != [str(rack) for rack in range(len(racks))] or not 2 <= len(racks) <= 4:
        remedy = "Give 0,1 or 0,1,witness or 0,1,2, up to four racks."
        raise ConfigError("members", members, "must list the racks from 0 on", remedy)
    return len(racks), witness


def explore(bounds: Bounds | Founding, limit: int | None, console: Console) -> int:
    """Visit all states; the exit status: 0 all hold, 1 an invariant breaks, 2 not all were seen."""
    started = time.monotonic()
    seen = Progress(0, 0, 0, 0)

    def tell(progress: Progress) -> None:
        nonlocal seen
        seen = progress
        say(console, _line(progress, time.monotonic() - started))

    try:
        if isinstance(bounds, Founding):
            found = founding.explore(founding.ModelWorld(bounds), tell, limit)
        else:
            found = Explorer(bounds).run(tell, limit)
    except KeyboardInterrupt:
        say(console, f"stopped after {seen.states:,} states; no invariant broke")
        return 2
    say(console, _line(found.progress, time.monotonic() - started))
    if found.broken:
        say(console, f"BROKEN: {found.broken}")
        for line in found.trace:
            say(console, line)
        return 1
    if not found.complete:
        say(console, f"stopped at the limit of {limit:,} states; no invariant broke")
        return 2
    say(console, "visited every state within these bounds; no invariant broke")
    return 0


def _line(progress: Progress, seconds: float) -> str:
    return (
        f"{progress.states:,} states, {progress.steps:,} steps, depth {progress.depth}, "
        f"frontier {progress.frontier:,}, {progress.states / max(seconds, 1e-3):,.0f} states/s, "
        f"{seconds:.1f} s"
    )
