"""A run in figures and words: totals, verdicts, headline, tiles, digests, settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median_high
from typing import NamedTuple

from mend.config import describe
from mend.coordination.slow import OWN_PAST
from mend.engine.state.outcome import GOOD, KEPT
from mend.engine.state.participation import describe_rounds, short_of
from mend.status.loudness import SLOW_RATIO_LEAST
from mend.tools.report.facts import RankFacts, RunFacts
from mend.tools.report.rounds import Rounds
from mend.types import SECOND, rack_name

FRAGMENTS_SHOWN = 16
SLOW_SHOWN = 8
IN_ORDER = GOOD | KEPT | {""}
FP32_BYTES = 4
OF_A_PLACE = frozenset(
    {"rack", "sideband_addr", "sideband_peers", "witness_addr", "advertise_host", "diagnostics_dir",
     "key_file"}
)  # fmt: skip
"""Settings that differ from rack to rack; and a page that is shown around tells no addresses."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A question with its answer; `fine` None: it cannot be said."""

    question: str
    answer: str
    fine: bool | None


@dataclass(frozen=True, slots=True)
class Total:
    """The sums of a rack."""

    ranks: int
    steps: int
    tokens: int
    tokens_per_s: float
    stall_share: float
    bytes_sent: int
    bytes_received: int
    merged_share: float | None
    """Share of its tokens that was merged, averaged over fragments; None: not known, as a rack
    that was killed offered more than it counted last."""
    closed: bool
    outcome: str = ""
    """How a rank ended, if one did not end in order."""


class Fact(NamedTuple):
    """A figure, its name, and what it is or is compared with."""

    name: str
    figure: str
    more: str


@dataclass(frozen=True, slots=True)
class Alone:
    """A run without exchange, which others are compared with."""

    name: str
    loss: float | None
    steps: int
    tokens_per_s: float


def total(facts: RunFacts, rack: int) -> Total:
    ranks = [each for each in facts.of_rack(rack) if each.track.newest is not None]
    newest = [each.track.newest for each in ranks if each.track.newest is not None]
    tokens = sum(point.tokens for point in newest)
    stall_s = sum(point.stall_ms for point in newest) / 1000 / max(1, len(newest))
    merged = facts.tokens_merged[rack] / max(1, len(facts.fragments))
    seconds = max((_seconds(each) for each in ranks), default=0.0)
    closed = bool(ranks) and all(each.closed for each in ranks)
    share = merged / tokens if tokens else 0.0
    counted = all(each.now.step >= each.captured for each in ranks if each.now)
    return Total(
        ranks=len(ranks),
        steps=max((max(each.now.step, each.captured) for each in ranks if each.now), default=0),
        tokens=max(tokens, int(merged)),
        tokens_per_s=sum(_rate(each) for each in ranks),
        stall_share=min(1.0, stall_s / seconds) if seconds else 0.0,
        bytes_sent=sum(point.bytes_sent for point in newest),
        bytes_received=sum(point.bytes_received for point in newest),
        merged_share=share if (closed or counted) and share <= 1 else None,
        closed=closed,
        outcome=next((each.outcome for each in ranks if each.outcome not in IN_ORDER), ""),
    )


def _seconds(rank: RankFacts) -> float:
    points = rank.track.points()
    return (points[-1].at_ns - points[0].at_ns) / SECOND if points else 0.0


def _rate(rank: RankFacts) -> float:
    """Tokens per second from the end of the first step to the end of the last."""
    points, seconds = rank.track.points(), _seconds(rank)
    return (points[-1].tokens - points[0].tokens) / seconds if seconds > 0 else 0.0


def wall_s(facts: RunFacts) -> float:
    return max(0.0, (facts.end_ns - facts.begin_ns) / SECOND)


def last_tenth(facts: RunFacts, name: str) -> float | None:
    """The mean over all ranks of the last tenth of what they have recorded."""
    values = [each.curves[name].values for each in facts.ranks.values() if name in each.curves]
    tails = [each[-max(1, len(each) // 10) :] for each in values if each]
    return mean([mean(each) for each in tails]) if tails else None


def mean(values: Sequence[float]) -> float:
    """Of any floats: `statistics.fmean` raises for infinities of both signs."""
    return sum(values) / len(values)


# ------------------------------------------------------------------ verdicts and tiles


def verdicts(facts: RunFacts, totals: dict[int, Total]) -> list[Verdict]:
    answers = [same_bits(facts)] if facts.exchange else []
    late = [rack for rack, one in totals.items() if not one.closed]
    if facts.rounds:
        answers.append(_merged(facts, totals))
    if facts.participation:
        rounds = list(facts.participation.elements())
        enough = 2 * short_of(rounds) <= len(rounds) or None
        answers.append(Verdict("Racks in a round", describe_rounds(rounds), enough))
    slow = [
        f"rack {rack}{_cause(facts, rack, against)}, {one.ratio:.1f}x its {against}, found at "
        f"its step {one.step}"
        for (rack, against), one in sorted(facts.slow.items(), key=lambda item: item[0])
    ]
    mild = all(one.ratio < SLOW_RATIO_LEAST for one in facts.slow.values())
    links = [
        f"{source} -> {sink}, {one.ratio:.1f}x its own past per byte, found at step {one.step} of "
        f"rack {sink}"
        for (source, sink), one in sorted(facts.slow_links.items())
    ]
    evicted = [
        f"rack {rack}, to be started again: {why}" for rack, why in sorted(facts.evicted.items())
    ]
    alone = [
        f"merged rack {rack} alone: {one.rounds} rounds, {one.tokens:,} tokens, from its capture "
        f"at step {one.since_step} on"
        for rack, one in sorted(facts.last_alone.items())
    ]
    lists = (
        ("Last rounds", alone, False),
        ("Slow racks", slow, None if mild else False),
        ("Slow links", links, False),
        ("Evicted racks", evicted, None),
    )
    for question, sentences, fine in lists:  # None: an eviction is neither right nor wrong
        if sentences:
            answers.append(Verdict(question, "; ".join(sentences[:SLOW_SHOWN]), fine))
    answers.append(_ended(late, totals))
    count = sum(facts.fault_counts.values())
    answers.append(Verdict("Warnings and faults", str(count or "none"), count == 0))
    return answers


def _merged(facts: RunFacts, totals: dict[int, Total]) -> Verdict:
    shares = [one.merged_share for one in totals.values() if one.merged_share is not None]
    unknown = [rack_name(rack) for rack, one in totals.items() if one.merged_share is None]
    earlier = any(each.track.kept[0].step > 1 for each in facts.ranks.values() if each.track.kept)
    share, parts = min(shares, default=0.0), []
    if shares or not unknown:
        whose = "the other racks'" if unknown else "every rack's"
        parts = [f"{'' if share > 0.999 else 'at least '}{share:.1%} of {whose} tokens"]
        if earlier:
            parts[0] += ", those of before it was resumed included"
    if unknown:
        parts.append(f"not known of {', '.join(unknown)}, whose counts are incomplete")
    open_ = unknown or earlier or not all(one.closed for one in totals.values())
    fine = None if open_ else share > 0.99
    return Verdict("Work merged", "; ".join(parts), fine)


def _ended(late: Sequence[int], totals: dict[int, Total]) -> Verdict:
    bad = [
        f"{rack_name(rack)} ended {one.outcome}"
        for rack, one in totals.items()
        if one.outcome and rack not in late
    ]
    if late:
        bad.append(f"{', '.join(map(rack_name, late))} stopped, or still trains")
    return Verdict("Ended in order", f"no: {'; '.join(bad)}" if bad else "yes", not bad)


def _cause(facts: RunFacts, rack: int, against: str) -> str:
    words = facts.causes.get(rack, "") if against == OWN_PAST else ""
    return words and f" {words}"


def same_bits(facts: RunFacts) -> Verdict:
    question = "All digests equal"
    if facts.differences:
        return Verdict(question, f"NO: {facts.differences[0]}", False)
    if not facts.rounds:
        return Verdict(question, "nothing was merged", None)
    if not facts.agreed:
        return Verdict(question, "only one rank's events are here", None)
    alone = f"; {facts.alone} are in one file only" if facts.alone else ""
    return Verdict(question, f"yes, in {facts.agreed} rounds{alone}", True)


def alone_of(runs: Iterable[tuple[str, RunFacts, dict[int, Total]]]) -> Alone | None:
    """The newest of these runs in which no rack exchanged anything."""
    found = None
    for name, facts, totals in runs:
        if totals and not facts.exchange:
            found = Alone(name, last_tenth(facts, "loss"), steps_of(facts), _speed(totals))
    return found


def headline(facts: RunFacts, totals: dict[int, Total], alone: Alone | None) -> list[Fact]:
    """Loss, speed and bytes, each against what a reader compares it with."""
    found = []
    if (loss := last_tenth(facts, "loss")) is not None:
        more = "mean of the last tenth, as recorded"
        if facts.exchange and alone and alone.loss and alone.steps == steps_of(facts):
            change = f"{loss / alone.loss - 1:+.1%} against {alone.loss:.4f}"
            more = f"{change} without exchange, at equal steps; {more}"
        found.append(Fact("Loss", f"{loss:.4f}", more))
    speed, more = _speed(totals), "all racks"
    if facts.exchange and alone and alone.tokens_per_s:
        share = speed / alone.tokens_per_s
        more = f"{share:.1%} of the {short(alone.tokens_per_s).strip()} tokens/s without exchange"
    elif facts.exchange:
        more = f"all racks; the worst waited {worst_stall(totals):.1%} of the time for rounds"
    found.append(Fact("Tokens per second", short(speed).strip(), more))
    if facts.exchange and (sent := sum(one.bytes_sent for one in totals.values())):
        found.append(Fact("Sent", f"{short(sent)}B", _bytes_of(facts, totals, sent)))
    return found


def _bytes_of(facts: RunFacts, totals: dict[int, Total], sent: int) -> str:
    """`sent` against a ring all-reduce of fp32 gradients between the racks after every step."""
    others = max(0, len(totals) - 1)
    ring_bytes = 2 * others * FP32_BYTES * facts.elements * steps_of(facts)
    if not ring_bytes:
        return f"{short(sent / max(wall_s(facts), 1e-9))}B/s, all racks"
    times, way = (ring_bytes / sent, "less") if ring_bytes >= sent else (sent / ring_bytes, "more")
    figure = f"{times:,.0f}" if times >= 100 else f"{times:.3g}"
    return f"{figure} times {way} than an fp32 all-reduce of every step: {short(ring_bytes)}B"


def steps_of(facts: RunFacts) -> int:
    """Of the furthest rank."""
    newest = [each.track.newest for each in facts.ranks.values()]
    return max((point.step for point in newest if point is not None), default=0)


def _speed(totals: dict[int, Total]) -> float:
    return sum(one.tokens_per_s for one in totals.values())


def tiles(facts: RunFacts, totals: dict[int, Total]) -> list[Fact]:
    """The other figures of the run."""
    found = []
    if facts.rounds or facts.exchange:
        found.append(Fact("Stall", f"{worst_stall(totals):.1%}", "of the time, worst rack"))
    if facts.rounds:
        missed = sum(facts.rounds - facts.merged[rack] for rack in facts.racks)
        found += [
            Fact("Rounds", str(facts.rounds), f"decided; {missed} times without a rack"),
            Fact("Round time", round_time(facts), "from capture to decision, median"),
        ]
    size, fp32_bytes = facts.offered
    if size:
        residual = median_high(facts.residuals.values)
        way = "less" if size <= fp32_bytes else "more"
        saved = f"{short(abs(fp32_bytes - size))}B {way} per receiver than fp32"
        found += [
            Fact("Compression", f"{fp32_bytes / size:.3g} x", saved),
            Fact("Residual", f"{residual:.1%}", "of an offer's length, sent later; median"),
        ]
    if facts.moment_rounds:
        of_all = f"of these rounds; offers of {short(facts.moment_bytes)}B per receiver"
        found.append(Fact("Moments, running statistics", str(facts.moment_rounds), of_all))
    if facts.data is not None:
        done, open_, left, again, epoch = facts.data
        more = f"rows done; {open_} open, {left} left, {again} given out again; {epoch}"
        found.append(Fact("Data", f"{done} of {done + open_ + left}", more))
    rounds, momentum = facts.outer
    if momentum:
        after = f"after {rounds:g} rounds, of the last one"
        found.append(Fact("Outer momentum", f"{momentum:.2f}", after))
    return found


def worst_stall(totals: dict[int, Total]) -> float:
    return max((one.stall_share for one in totals.values()), default=0.0)


def round_time(facts: RunFacts) -> str:
    """The median from a rack's capture to the decision; "-" where none was captured."""
    return duration(median_high(waits)) if (waits := facts.waits.values) else "-"


def extent(facts: RunFacts, totals: dict[int, Total]) -> str:
    """One sentence: how large the run was."""
    if not totals:
        return "no rack has written an event"
    count, ranks = len(totals), sorted({one.ranks for one in totals.values()})
    inside = f" of {ranks[0]} ranks" if len(ranks) == 1 and ranks[0] > 1 else ""
    least, most = (
        min(one.steps for one in totals.values()),
        max(one.steps for one in totals.values()),
    )
    steps = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    tokens = sum(one.tokens for one in totals.values())
    begun = datetime.fromtimestamp(facts.begin_ns / SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f"{count} rack{'s' * (count != 1)}{inside}, {steps} steps and {short(tokens)} tokens in "
        f"{duration(wall_s(facts))} from {begun}"
    )


# ------------------------------------------------------------------ tables


Digest = tuple[int, str] | None
"""(version, its bits) of a fragment on a rack; None: the rack has recorded none."""


def digests(facts: RunFacts) -> tuple[list[int], list[tuple[int, list[Digest], bool]]]:
    """The racks whose leaders have recorded versions, and by fragment the newest version on each
    of these racks, and whether the bits of the newest are equal."""
    leaders = {each.rack: each for each in facts.ranks.values() if each.versions and not each.rank}
    fragments = sorted({fragment for each in leaders.values() for fragment in each.versions})
    rows = []
    for fragment in fragments:
        known: list[Digest] = [leaders[rack].versions.get(fragment) for rack in sorted(leaders)]
        newest = max(each for each in known if each)[0]
        bits = {each[1] for each in known if each and each[0] == newest}
        rows.append((fragment, known, len(bits) == 1))
    return sorted(leaders), rows


def changed_settings(rounds: Rounds) -> list[tuple[str, object]]:
    """Return the settings on the tape that differ from their defaults, by name."""
    defaults = {setting.field: setting.default for setting in describe()}
    return [
        (name, value)
        for name, value in sorted(rounds.settings.items())
        if name not in OF_A_PLACE and _plain(defaults.get(name)) != _plain(value)
    ]


def _plain(value: object) -> str:
    """A tape has lists where the settings have tuples."""
    return str(list(value)) if isinstance(value, list | tuple) else str(value)


# ------------------------------------------------------------------ words


def short(value: float) -> str:
    """Three figures and a prefix, with a space: `12.3 M`, `812 `."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # three figures of it round to one of the larger unit
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} " if value != int(value) else f"{int(value)} "


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
