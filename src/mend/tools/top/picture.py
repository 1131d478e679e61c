"""One picture of a job, made of the JobStatus of its processes. Pure.

Every rack is described by itself where it answers, else by the coordinator, else by any process
that knows it. Times are seconds, rates are per second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from mend.coordination.slow import sentence_of
from mend.status.messages import JobStatus, RackSeen, TrainingSeen
from mend.types import SECOND, rack_name

SLOW_RATIO = 1.5
"""A rack whose step takes so many times the median of the racks is called slow."""

TAKEN_OVER = (
    "ballot", "configured", "fragments", "period_steps", "overlap_steps", "merge_min_racks",
    "lockstep", "commits", "versions", "in_flight",
)  # fmt: skip
"""Fields of a JobStatus that a picture shows as they are."""

SILENCES = {
    "closed": "no connection: no process listens there, this machine does not know the name of the "
    "host, or a firewall is in between",
    "hung-up": "the process that listens there hangs up at once: it has another key than the one "
    "of MEND_KEY_FILE, or is not a sideband of mend",
    "open": "the process that listens there is not a sideband of mend",
    "locked": "it is a sideband of a job with another key, or with one where MEND_KEY_FILE is not "
    "set",
}
"""State of the connection to an address -> why it does not answer."""

LATE_S = 3.0
"""Without an answer for longer than this, and than three questions, an address is silent."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The newest answer of an address, `age_s` ago. `view` None: nothing yet. `way`: state of the
    connection: closed, open, speaks."""

    address: str
    view: JobStatus | None
    age_s: float
    way: str


@dataclass(frozen=True, slots=True)
class RackLine:
    """One rack. None: nobody who answers knows."""

    rack: int
    state: str = "absent"
    """starting, running, joining, leaving, ended, silent, absent (not in the job yet)."""
    source: str = ""
    """itself, or who said this."""
    address: str = ""
    ranks: int | None = None
    step: int | None = None
    lag_steps: int | None = None
    """Behind the rack that is furthest."""
    behind: int | None = None
    """Decided versions that it does not hold yet, over all fragments."""
    steps_per_s: float | None = None
    """Steps of the last seconds, mend's waits included."""
    tokens_per_s: float | None = None
    step_ms: float | None = None
    """Without mend's waits."""
    slow: float | None = None
    """Times the median step time, where that is SLOW_RATIO or more: suspected, not judged."""
    stall_share: float | None = None
    stall_s: float | None = None
    sent_per_s: float | None = None
    received_per_s: float | None = None
    missed: int | None = None
    silent_s: float | None = None
    recorded: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundLine:
    fragment: int
    version: int
    phase: str
    racks: tuple[int, ...]
    for_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A moment of a job. `notices`: plain sentences for the reader."""

    job: str
    state: str = "nobody"
    """nobody (answers), starting, running, leaving, ended."""
    coordinator: str = ""
    ballot: int = 0
    configured: int = 0
    fragments: int = 0
    period_steps: int = 0
    overlap_steps: int = 0
    merge_min_racks: int = 0
    lockstep: bool = False
    commits: int = 0
    versions: tuple[int, ...] = ()
    closed_by: str = ""
    racks: tuple[RackLine, ...] = ()
    in_flight: int = 0
    rounds: tuple[RoundLine, ...] = ()
    notices: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    """Addresses that do not answer, with the reason."""
    participation: str = ""
    """How many of the live racks the recent rounds merged, in words."""
    data: dict[str, int | str] | None = None
    """Rows of the data ledger: done, open, left, given_again; and the epoch."""


def picture_of(answers: Sequence[Answer], late_s: float = LATE_S, job: str = "") -> Picture:
    """`late_s`: age after which an answer no longer counts. `job`: the one that was asked for."""
    known = [(answer.view, answer) for answer in answers if answer.view is not None]
    fresh = [view for view, answer in known if answer.age_s <= late_s and view.state != "ended"]
    views = fresh or [view for view, _ in known]
    first = max(views, key=worth, default=None)
    others = [view for view in views if first is not None and view.job == first.job]
    silent = tuple(_silence(a, job) for a in answers if _is_silent(a, late_s))
    if first is None:
        return Picture(job, silent=silent)
    own = {view.rack: view for view, _ in known if view.job == first.job and view.training}
    lively = {view.rack for view in fresh}
    racks = _with_comparisons(list(_lines(first, others, own, lively)))
    over = is_over(answers)
    training = [view.training for view in others if view.training is not None]
    picture = Picture(
        job=first.job,
        state=_state(first, racks) if fresh else "nobody",
        coordinator=rack_name(first.coordinator),
        **{name: getattr(first, name) for name in TAKEN_OVER},
        closed_by=next((each.closed_by for each in training if each.closed_by), ""),
        participation=next((each.participation for each in training if each.participation), ""),
        data=structs.asdict(first.data) if first.data is not None else None,
        racks=tuple(racks),
        rounds=tuple(
            RoundLine(r.fragment, r.version, r.phase, r.racks, _seconds(r.for_ms, 1000), r.why)
            for r in first.rounds
        ),
        notices=tuple(_sentences(first, others, [view for view, _ in known], over)),
        silent=silent,
    )  # fmt: skip
    return _after_the_end(picture, [view for view, _ in known]) if over else picture


def _after_the_end(picture: Picture, known: Sequence[JobStatus]) -> Picture:
    """No rack trains and no round is open, whatever a rack said last before it ended."""
    gone = {view.rack for view in known if view.state == "ended" and view.job == picture.job}
    racks = tuple(
        _ended(line) if line.rack in gone else _unless_lost(line) for line in picture.racks
    )
    return replace(picture, state="ended", racks=racks, in_flight=0, rounds=())


def with_former_racks(picture: Picture, former: Iterable[RackLine]) -> Picture:
    """At the end a leader knows no rack any more; those of the picture before it have ended."""
    shown = {line.rack for line in picture.racks}
    missing = [_unless_lost(line) for line in former if line.rack not in shown]
    lines = sorted((*picture.racks, *missing), key=lambda line: line.rack)
    return replace(picture, racks=tuple(lines))


def _unless_lost(line: RackLine) -> RackLine:
    return line if line.state in ("silent", "absent") else _ended(line)


def _ended(line: RackLine) -> RackLine:
    return replace(line, state="ended")


def addresses_of(view: JobStatus) -> list[str]:
    """Return the addresses of the other leaders of the job that this process knows."""
    return [rack.address for rack in view.racks if rack.address and rack.rack != view.rack]


def is_over(answers: Iterable[Answer]) -> bool:
    """Return whether the job has ended: its log says so, or all its racks have said good-bye."""
    views = [answer.view for answer in answers if answer.view is not None]
    goodbyes = [view for view in views if view.state == "ended"]
    gone = {view.rack for view in goodbyes}
    members = {rack.rack for view in goodbyes for rack in view.racks}
    return any(view.over for view in goodbyes) or bool(members and members <= gone)


def worth(view: JobStatus) -> tuple[bool, int, int, int]:
    """Orders views of one job: that of the coordinator first, then the one that knows most."""
    return view.coordinates, view.ballot, view.decided, -view.rack


def _state(first: JobStatus, racks: Sequence[RackLine]) -> str:
    """The job leaves when all that are left in it do; who is asked may be done before the rest."""
    if first.state == "starting":
        return first.state
    going = [line.state for line in racks if line.state not in ("silent", "ended", "absent")]
    return "leaving" if going and set(going) == {"leaving"} else "running"


def _sentences(
    first: JobStatus, others: Sequence[JobStatus], known: Sequence[JobStatus], over: bool
) -> list[str]:
    """`over`: the job has ended; then the end of a rack is news only with its reason."""
    sentences = [*first.why, *map(sentence_of, first.slow)]
    start_it = "was evicted because it was slow: start it again (mend launch does) to rejoin"
    sentences += [
        f"rack {r} {start_it}; permanently lost: `mend retire {r}`" for r in first.evicted
    ]
    if first.missing:
        sentences.append("no hello yet from " + ", ".join(map(rack_name, first.missing)))
    sentences += [f"{rack_name(view.rack)}: {view.detail}" for view in others if view.detail]
    for view in known:
        if view.state == "ended" and view not in others and (view.detail or not over):
            sentences.append(
                f"{rack_name(view.rack)} has ended" + (view.detail and f": {view.detail}")
            )
        if view.job != first.job:
            sentences.append(f"{rack_name(view.rack)} of another job also answers: {view.job}")
    versions = {view.mend for view in others}
    if len(versions) > 1:
        sentences.append("different versions of mend: " + ", ".join(sorted(versions)))
    return list(dict.fromkeys(sentences))


# ------------------------------------------------------------------ racks


def _lines(
    first: JobStatus, others: Sequence[JobStatus], own: dict[int, JobStatus], lively: set[int]
) -> Iterable[RackLine]:
    """Ascending. `own`: what racks said of themselves last; `lively`: who says it now."""
    seen = {each.rack: (each, first) for each in first.racks}
    for view in sorted(others, key=worth, reverse=True):
        for each in view.racks:
            known = seen.get(each.rack)
            if known is None or (known[0].step < 0 <= each.step):
                seen[each.rack] = (each, view)
    for view in own.values():  # of itself a rack knows best
        mine = next((each for each in view.racks if each.rack == view.rack), None)
        if mine is not None and (view.rack in lively or view.rack not in seen):
            seen[view.rack] = (mine, view)
    for rack in sorted(seen.keys() | set(first.missing)):
        if rack not in seen:
            yield RackLine(rack)
            continue
        each, source = seen[rack]
        speaks = rack in lively and rack in own
        yield _line(each, first, source, own.get(rack) if speaks or source.rack == rack else None)


def _line(each: RackSeen, first: JobStatus, source: JobStatus, own: JobStatus | None) -> RackLine:
    """`own`: its View of itself, if there is one that counts. It hears itself always, so for how
    long it was silent is for `first` to say."""
    heard = next((r for r in first.racks if r.rack == each.rack), each)
    unknown = first.rack == each.rack and not heard.live
    line = RackLine(
        each.rack,
        state=_rack_state(each, heard, first, own),
        source="itself" if own is not None else rack_name(source.rack),
        address=each.address,
        step=each.step if each.step >= 0 else None,
        behind=each.behind if each.behind >= 0 else None,
        step_ms=each.step_ns / 1e6 if each.step_ns else None,
        silent_s=None if unknown else _seconds(heard.silent_ms, 1000),
    )
    return line if own is None or own.training is None else _by_itself(line, own.training)


def _rack_state(each: RackSeen, heard: RackSeen, first: JobStatus, own: JobStatus | None) -> str:
    """Return the state of a rack. `heard`: as the rack that should hear it knows it."""
    others: str = "starting" if first.state == "starting" else "running"
    state = own.state if own is not None else others
    if state == "running":
        state = "joining" if each.newcomer else "leaving" if each.leaving else "running"
    return state if heard.live or state == "ended" else "silent"


def _by_itself(line: RackLine, training: TrainingSeen) -> RackLine:
    took_ns, recent_ns = training.recent_step_ns, training.recent_ns
    recorded = {name: v if math.isfinite(v) else str(v) for name, v in training.recorded}
    return replace(
        line,
        ranks=training.ranks,
        step=training.step,
        steps_per_s=_rate(training.recent_steps, took_ns),
        tokens_per_s=_rate(training.recent_tokens * training.ranks, took_ns),
        stall_share=min(1.0, 1000 * training.recent_stall_us / recent_ns) if recent_ns else None,
        stall_s=_seconds(training.stall_us, 1_000_000),
        sent_per_s=_rate(training.recent_sent, recent_ns),
        received_per_s=_rate(training.recent_received, recent_ns),
        missed=training.missed,
        recorded=recorded,
    )


def _with_comparisons(lines: list[RackLine]) -> list[RackLine]:
    """The rack that is furthest has no lag. Of an even number of racks the lower of the two middle
    step times is the median, so that of two racks the slow one is compared with the other."""
    front = max((line.step for line in lines if line.step is not None), default=0)
    times = [line.step_ms for line in lines if line.step_ms]
    median_ms = statistics.median_low(times) if len(times) > 1 else math.inf
    compared = []
    for line in lines:
        ratio = line.step_ms / median_ms if line.step_ms else 0.0
        lag = front - line.step if line.step is not None else None
        slow = ratio if ratio >= SLOW_RATIO else None
        compared.append(replace(line, lag_steps=lag, slow=slow))
    return compared


def _rate(count: int, took_ns: int) -> float | None:
    return count * SECOND / took_ns if took_ns > 0 else None


def _seconds(count: int, per_second: int) -> float | None:
    return count / per_second if count >= 0 else None


# ------------------------------------------------------------------ silence


def _is_silent(answer: Answer, late_s: float) -> bool:
    gone = answer.view is not None and answer.view.state == "ended"
    return not gone and (answer.view is None or answer.age_s > late_s)


def _silence(answer: Answer, job: str) -> str:
    """Say why an address does not answer, as far as one can tell from here."""
    if answer.view is not None:
        gone = ", and no connection: the process or the route to it is gone"
        reason = f"no answer for {answer.age_s:.0f} s{gone if answer.way == 'closed' else ''}"
    else:
        of_no_leader = "runs with observe=false, or does not belong to the leader of a rack"
        of_another_job = f"not of job {job!r}, or it runs with observe=false"
        speaks = f"it is a sideband, but {of_another_job if job else of_no_leader}"
        reason = SILENCES.get(answer.way, speaks)
    return f"{answer.address}: {reason}"
