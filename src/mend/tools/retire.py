"""`mend retire`: finds the job as `mend top` does, tells all its processes, and says what follows.

It refuses a rack that answers; each process decides once more by what it has heard itself.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from mend.coordination import wire
from mend.coordination.messages import Envelope, Retire
from mend.status.messages import JobStatus, RackSeen
from mend.tools.top.picture import Answer, worth
from mend.tools.top.run import STRAGGLER_S, Wanted, Watch, watching
from mend.types import PERSON, WITNESS, rack_name

ASK_S = 0.25
"""Time between two rounds of questions."""

FIRST_S = 3.0
"""Longest wait for the first answer."""

INTERRUPTED = 130


def retire(rack: int, addresses: tuple[str, ...], job: str, wait_s: float) -> int:
    """Returns the exit status. Raises ConfigError for what is not an address."""
    with watching(Wanted(addresses, job, ASK_S, True, False, FIRST_S)) as watch:
        try:
            return _retire(rack, watch, wait_s)
        except KeyboardInterrupt:
            print(
                "mend retire: interrupted; what was declared before stays declared", file=sys.stderr
            )
            return INTERRUPTED


def _retire(rack: int, watch: Watch, wait_s: float) -> int:
    watch.gather(FIRST_S, ASK_S)
    answers = live_answers(watch.answers())
    if not answers:
        silent = "; ".join(watch.picture().silent)
        return _refuse(f"nobody answers. {silent}. Name the leader of a rack, or the witness")
    first = best(answers)
    if reason := refusal(answers, rack):
        return _refuse(reason)
    seat, life = seat_of(answers, rack), evicted_life(answers, rack)
    about = ", ".join(sorted(rack_name(answer.view.rack) for answer in answers if answer.view))
    where = seat.address if seat is not None else "evicted, and not back"
    life = seat.life if seat is not None else life
    if life is None:
        return _refuse(f"the answers contradict each other about rack {rack}. Try again")
    print(f"job {first.job!r}: telling {about} that rack {rack} ({where}) is permanently lost")
    gone = Retire(rack, life)
    frame = wire.encode(Envelope(first.job, PERSON, 0, secrets.randbits(62), gone))
    end, found = time.monotonic() + wait_s, RetireResult("", final=False, accepted=False)
    while time.monotonic() < end:
        for answer in answers:
            watch.client.ask(answer.address, frame)
        watch.listen(ASK_S / 2)
        watch.ask()
        watch.listen(ASK_S)
        answers = live_answers(watch.answers()) or answers
        found = outcome(answers, rack, life)
        if found.final:
            break
    print(found.text)
    return 0 if found.accepted else 1


def _refuse(reason: str) -> int:
    print(f"mend retire: {reason}", file=sys.stderr)
    return 1


# ------------------------------------------------------------------ pure


def live_answers(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers of processes that are there now."""
    late_s = FIRST_S + STRAGGLER_S
    return [a for a in answers if a.view and a.view.state != "ended" and a.age_s <= late_s]


def views_of(answers: Sequence[Answer]) -> list[JobStatus]:
    return [answer.view for answer in answers if answer.view is not None]


def best(answers: Sequence[Answer]) -> JobStatus:
    """Return the view of the process that coordinates, else of the one that knows most."""
    return max(views_of(answers), key=worth)


def seat_of(answers: Sequence[Answer], rack: int) -> RackSeen | None:
    """The rack as the best view knows it."""
    return next((seen for seen in best(answers).racks if seen.rack == rack), None)


def evicted_life(answers: Sequence[Answer], rack: int) -> int | None:
    """Return the life of a rack that was evicted and is not back, as the best view knows it."""
    first = best(answers)
    return dict(zip(first.evicted, first.evicted_lives, strict=False)).get(rack)


def refusal(answers: Sequence[Answer], rack: int) -> str:
    """Say why this rack cannot be retired; empty: it can."""
    views, first, seat = views_of(answers), best(answers), seat_of(answers, rack)
    jobs = sorted({view.job for view in views})
    if len(jobs) > 1:
        return f"several jobs answer ({', '.join(jobs)}): name one with --job-id"
    if first.state == "starting":
        return f"job {first.job!r} has not begun, so rack {rack} has no seat to lose"
    if seat is None and evicted_life(answers, rack) is not None:
        back = next((a.address for a in answers if a.view and a.view.rack == rack), "")
        return back and f"rack {rack} is alive: it answers at {back}, and joins the job again"
    if seat is None:
        seats = ", ".join(str(seen.rack) for seen in first.racks)
        return f"rack {rack} has no seat in job {first.job!r}, which has racks {seats}"
    for answer in answers:
        view = answer.view
        if view and view.rack == rack and view.life == seat.life:
            return f"rack {rack} is alive: it answers at {answer.address}. Stop it first"
    if first.coordinates and seat.live:
        who = rack_name(first.rack)
        return (
            f"rack {rack} is alive: {who}, which coordinates, heard it {seat.silent_ms} ms ago. "
            "Stop it first; if it has just died, ask again in some seconds"
        )
    return ""


class RetireResult(NamedTuple):
    """`text`: what has become of it. `final`: nothing more will change. `accepted`: by a process of
    the job at least."""

    text: str
    final: bool
    accepted: bool = True


def outcome(answers: Sequence[Answer], rack: int, life: int) -> RetireResult:
    """The outcome so far, as the answers tell it."""
    views, first, seat = views_of(answers), best(answers), seat_of(answers, rack)
    seated = seat is not None and seat.life == life
    if first.coordinates and not seated and evicted_life(answers, rack) != life:
        racks = ", ".join(str(seen.rack) for seen in first.racks) or "none"
        return RetireResult(f"rack {rack} is out; the job goes on with racks {racks}", final=True)
    noted = sorted(rack_name(view.rack) for view in views if rack in view.retired)
    if not noted:
        again = f"no process accepted it: {rack_name(first.rack)} may hear rack {rack} again"
        return RetireResult(again, final=False, accepted=False)
    here = {view.rack for view in views}
    # A rack that does not answer here may answer the process that coordinates.
    there = {*here, *first.retired, *(s.rack for s in first.racks if first.coordinates and s.live)}
    missing = [s.rack for s in first.racks if s.rack not in there]
    retired = f"rack {rack} is retired ({', '.join(noted)} know{'s' * (len(noted) == 1)} it)"
    if missing:
        racks = ", ".join(map(str, missing))
        each = " and ".join(f"`mend retire {r}`" for r in missing)
        lacking = f"{retired}; there is no quorum without {racks}: start it again, or {each}"
        return RetireResult(lacking, final=not first.coordinates)
    if here <= {WITNESS}:
        again = "start all racks again to begin a new job under this name"
        return RetireResult(f"{retired}; no rack of the job is left: {again}", final=True)
    waits = f"{retired}; the remaining racks have not continued yet: watch them with `mend top`"
    return RetireResult(waits, final=False)
