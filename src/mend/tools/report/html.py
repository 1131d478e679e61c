"""The figures of a run in words: verdicts, tiles, tables. Pure; all text leaves here escaped."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from mend.config import describe
from mend.engine.turnout import short_of, told
from mend.tools.report.facts import FAULTS_SHOWN, RankFacts, RunFacts, clean
from mend.tools.report.rounds import MEANS, PHASES, Rounds
from mend.types import SECOND

FRAGMENTS_SHOWN = 16
SLOW_SHOWN = 8
OF_A_PLACE = frozenset(
    {"rack", "sideband_addr", "sideband_peers", "witness_addr", "advertise_host", "diagnostics_dir"}
)
"""Settings that differ from rack to rack; and a page that is shown around tells no addresses."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A question with its answer; `fine` None: it cannot be said."""

    question: str
    answer: str
    fine: bool | None


@dataclass(frozen=True, slots=True)
class Total:
    """What a rack came to."""

    ranks: int
    steps: int
    tokens: int
    tokens_per_s: float
    stall_share: float
    bytes_sent: int
    bytes_received: int
    merged_share: float
    """Of its tokens; averaged over fragments."""
    closed: bool


def text(value: object) -> str:
    """Escaped, without what is not printable."""
    return html.escape(clean(str(value)))


def total(facts: RunFacts, rack: int) -> Total:
    ranks = [each for each in facts.of_rack(rack) if each.track.newest is not None]
    newest = [each.track.newest for each in ranks if each.track.newest is not None]
    tokens = sum(point.tokens for point in newest)
    stall_s = sum(point.stall_ms for point in newest) / 1000 / max(1, len(newest))
    merged = facts.tokens_merged[rack] / max(1, len(facts.fragments))
    seconds = max((_seconds(each) for each in ranks), default=0.0)
    return Total(
        ranks=len(ranks),
        steps=max((point.step for point in newest), default=0),
        tokens=tokens,
        tokens_per_s=sum(_rate(each) for each in ranks),
        stall_share=min(1.0, stall_s / seconds) if seconds else 0.0,
        bytes_sent=sum(point.bytes_sent for point in newest),
        bytes_received=sum(point.bytes_received for point in newest),
        merged_share=min(1.0, merged / tokens) if tokens else 0.0,
        closed=bool(ranks) and all(each.closed for each in ranks),
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


def loss_of(facts: RunFacts) -> float | None:
    """The newest smoothed loss: mean of the last tenth of every curve."""
    tails = []
    for each in facts.ranks.values():
        if "loss" in each.curves and (values := each.curves["loss"].values):
            tail = values[-max(1, len(values) // 10) :]
            tails.append(sum(tail) / len(tail))
    return sum(tails) / len(tails) if tails else None


# ------------------------------------------------------------------ verdicts and tiles


def verdicts(facts: RunFacts, totals: dict[int, Total]) -> list[Verdict]:
    found = [same_bits(facts)] if facts.exchange else []
    late = [rack for rack, one in totals.items() if not one.closed]
    if facts.rounds:
        share = min((one.merged_share for one in totals.values()), default=0.0)
        said = f"{'' if share > 0.999 else 'at least '}{share:.1%} of every rack's tokens"
        found.append(Verdict("Work merged", said, None if late else share > 0.99))
    if facts.turnout:
        rounds = list(facts.turnout.elements())
        fine = 2 * short_of(rounds) <= len(rounds) or None
        found.append(Verdict("Racks in a round", told(rounds), fine))
    if facts.slow:
        each = sorted(facts.slow.items(), key=lambda one: one[0])[:SLOW_SHOWN]
        slow = "; ".join(
            f"rack {rack}{one.cause and ' '}{one.cause}, {one.ratio:.1f}x its {against}, found at "
            f"its step {one.step}"
            for (rack, against), one in each
        )
        found.append(Verdict("Slow racks", slow, False))
    if facts.slow_links:
        links = "; ".join(
            f"{a} -> {b}, {one.ratio:.1f}x its own past per byte, found at step {one.step} of "
            f"rack {b}"
            for (a, b), one in sorted(facts.slow_links.items())[:SLOW_SHOWN]
        )
        found.append(Verdict("Slow links", links, False))
    if facts.evicted:
        why = sorted(facts.evicted.items())[:SLOW_SHOWN]
        put_out = "; ".join(f"rack {rack}, to be started again: {reason}" for rack, reason in why)
        found.append(Verdict("Evicted racks", put_out, None))
    said = "yes" if not late else f"no: {racks(late)} stopped, or still trains"
    found.append(Verdict("Ended in order", said, not late))
    count = sum(facts.kinds.values())
    found.append(Verdict("Warnings and faults", str(count) if count else "none", count == 0))
    return found


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


def tiles(facts: RunFacts, totals: dict[int, Total]) -> list[tuple[str, str, str]]:
    """(what, figure, more)."""
    stall = max((one.stall_share for one in totals.values()), default=0.0)
    sent = sum(one.bytes_sent for one in totals.values())
    missed = sum(facts.rounds - facts.merged[rack] for rack in facts.racks)
    loss, waits = loss_of(facts), sorted(facts.waits.values)
    found = [
        (
            "Throughput",
            short(sum(one.tokens_per_s for one in totals.values())),
            "tokens per second, all racks",
        ),
        ("Stall", f"{stall:.1%}", "of the time, worst rack"),
        ("Rounds", str(facts.rounds), f"decided; {missed} times without a rack"),
        (
            "Round time",
            duration(waits[len(waits) // 2]) if waits else "-",
            "from capture to decision, median",
        ),
        ("Sent", f"{short(sent)}B", f"{short(sent / max(wall_s(facts), 1e-9))}B/s, all racks"),
    ]
    if not facts.rounds:
        found = found[: 2 if facts.exchange else 1]
    size, fp32_bytes = facts.offered
    if size:
        residuals = sorted(facts.residuals.values)
        middle = residuals[len(residuals) // 2] if residuals else 0.0
        saved = f"{short(fp32_bytes - size)}B less per receiver than fp32"
        found.append(("Compression", f"{fp32_bytes / size:.3g} x", saved))
        found.append(("Residual", f"{middle:.1%}", "of an offer's length, sent later; median"))
        energy = 1 - middle * middle
        found.append(("Captured", f"{energy:.1%}", "of an offer's energy (squares), median"))
    if facts.moment_rounds:
        of_all = f"of these rounds; offers of {short(facts.moment_bytes)}B per receiver"
        found.append(("Optimizer moments", str(facts.moment_rounds), of_all))
    rounds, momentum = facts.outer
    if momentum:
        found.append(
            ("Outer momentum", f"{momentum:.2f}", f"after {rounds:g} rounds, of the last one")
        )
    if loss is not None:
        found.insert(0, ("Loss", f"{loss:.4f}", "as recorded, mean of the last tenth"))
    return found


def headline(facts: RunFacts, totals: dict[int, Total]) -> str:
    """One sentence: how large the run was."""
    if not totals:
        return "no rack has written an event"
    many, ranks = len(totals), sorted({one.ranks for one in totals.values()})
    inside = f" of {ranks[0]} ranks" if len(ranks) == 1 and ranks[0] > 1 else ""
    steps = sorted({one.steps for one in totals.values()})
    steps_said = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    tokens = sum(one.tokens for one in totals.values())
    begun = datetime.fromtimestamp(facts.begin_ns / SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f"{many} rack{'s' * (many != 1)}{inside}, {steps_said} steps and {short(tokens)} tokens in "
        f"{duration(wall_s(facts))} from {begun}"
    )


# ------------------------------------------------------------------ tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    """Cells are escaped already. `kind`: "numbers" stand on the right, "words" on the left; "both":
    numbers, and words in the last column."""
    cells = "".join(f"<th>{each}</th>" for each in head)
    lines = ["<tr>" + "".join(f"<td>{each}</td>" for each in row) + "</tr>" for row in rows]
    body = "".join(lines)
    return f'<table class="{kind}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'


def racks_table(facts: RunFacts, totals: dict[int, Total], swatch: dict[int, str]) -> str:
    head = (
        "rack", "steps", "tokens", "tokens/s", "stall", "in rounds", "work merged", "sent",
        "received", "lives", "end", "missed because",
    )  # fmt: skip
    rows = []
    for rack, one in totals.items():
        missed = facts.missed.get(rack, Counter[str]())
        why = ", ".join(f"{text(reason)} ({count})" for reason, count in missed.items())
        lives = max((each.lives for each in facts.of_rack(rack)), default=0)
        rows.append(
            (
                f'<i style="background:{swatch[rack]}"></i>{rack}',
                f"{one.steps:,}",
                short(one.tokens),
                short(one.tokens_per_s),
                f"{one.stall_share:.1%}",
                f"{facts.merged[rack]} of {facts.rounds}" if facts.rounds else "-",
                f"{one.merged_share:.1%}" if facts.rounds else "-",
                f"{short(one.bytes_sent)}B",
                f"{short(one.bytes_received)}B",
                str(lives),
                "in order" if one.closed else "open",
                why or "-",
            )
        )
    return table(head, rows, "both")


def phases_table(rounds: Rounds, swatch: dict[str, str]) -> str:
    """Median, 90th percentile and most, per rack. Empty without tapes."""
    present = sorted({rack for rack, _ in rounds.ms})
    if not present:
        return ""
    head = ["phase", *(f"rack {rack}" for rack in present), "what it is"]
    rows = []
    for phase in PHASES:
        cells = []
        for rack in present:
            found = rounds.spread(rack, phase)
            cells.append(" / ".join(milliseconds(value) for value in found) if found else "-")
        name = f'<i style="background:{swatch[phase]}"></i>{phase}'
        rows.append([name, *cells, f"<small>{text(MEANS[phase])}</small>"])
    return table(head, rows, "both")


def faults_table(facts: RunFacts) -> str:
    if not facts.faults:
        return "<p>None: no warning, no fault.</p>"
    rows = []
    for each in facts.faults:
        at_s = (each.time_ns - facts.begin_ns) / SECOND
        who = racks([each.rack]) + (f" rank {each.rank}" if each.rank else "")
        rows.append(
            (f"{at_s:+.1f} s", text(who), text(each.kind), f"<small>{text(each.text)}</small>")
        )
    counts = ", ".join(f"{text(kind)} ({count})" for kind, count in facts.kinds.most_common())
    left = sum(facts.kinds.values()) - len(rows)
    more = (
        f"; the first {FAULTS_SHOWN} and the last are shown, {left} between are not"
        if left > 0
        else ""
    )
    said = f"<p>{counts}{more}. Times count from the first step.</p>"
    return said + table(("when", "who", "what", "more"), rows, "words")


def digests_table(facts: RunFacts) -> str:
    """The newest version that each rack's leader was told of, per fragment."""
    told = sorted((each for each in facts.ranks.values() if each.versions), key=lambda r: r.rack)
    leaders = {each.rack: each for each in told if each.rank == 0}
    if not leaders:
        return ""
    fragments = sorted({fragment for each in leaders.values() for fragment in each.versions})
    rows = []
    for fragment in fragments[:FRAGMENTS_SHOWN]:
        found = {rack: each.versions.get(fragment) for rack, each in leaders.items()}
        newest = max(one[0] for one in found.values() if one)
        bits = {one[1] for one in found.values() if one and one[0] == newest}
        cells = [
            f"version {one[0]} <code>{text(one[1][:12])}</code>" if one else "-"
            for one in found.values()
        ]
        rows.append([str(fragment), *cells, "equal" if len(bits) == 1 else "<b>DIFFER</b>"])
    head = ["fragment", *(f"rack {rack}" for rack in found), "bits at the newest version"]
    more = len(fragments) - FRAGMENTS_SHOWN
    return table(head, rows) + (f"<p>... and {more} more fragments.</p>" if more > 0 else "")


def settings_table(rounds: Rounds) -> str:
    """What is not as it is by default; as the tape says."""
    if not rounds.settings:
        return ""
    usual = {setting.field: setting.default for setting in describe()}
    rows = [
        (f"<code>{text(name)}</code>", text(value))
        for name, value in sorted(rounds.settings.items())
        if name not in OF_A_PLACE and _plain(usual.get(name)) != _plain(value)
    ]
    versions = ", ".join(f"{text(k)} {text(v)}" for k, v in sorted(rounds.versions.items()))
    head = ("setting", "value (others are as by default)")
    return f"<p>{versions}</p>" + table(head, rows, "words")


def _plain(value: object) -> str:
    """A tape has lists where the settings have tuples."""
    return str(list(value)) if isinstance(value, list | tuple) else str(value)


# ------------------------------------------------------------------ words


def racks(numbers: Sequence[int]) -> str:
    names = ["the witness" if rack == 0xFFFF else f"rack {rack}" for rack in numbers]
    return ", ".join(names)


def short(value: float) -> str:
    """Three figures and a prefix, with a space: `12.3 M`, `812 `."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
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


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
