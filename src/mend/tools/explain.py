"""`mend explain`: tells a round in sentences, from the facts of `trace_timeline`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import typer

from mend.consensus.records import Drop
from mend.errors import ConfigError, require
from mend.events.base import kind_of
from mend.events.kinds import RackMitigated
from mend.tools.report.summary import short
from mend.tools.trace_timeline import (
    SLOW_EVENTS,
    OfferFacts,
    RankTimes,
    RoundFacts,
    Story,
    newest_job,
    story_of,
)
from mend.trace.reader import read_tape, tapes_in
from mend.types import MS, SECOND, WITNESS

INDENT = "    "
NOTES_SHOWN = 30


def explain(
    paths: Sequence[Path],
    number: int | None,
    fragment: int | None,
    version: int | None,
    everything: bool,
) -> None:
    """Print it. Raises TapeError, and ConfigError for a round that is not on the tapes."""
    tapes = [read_tape(path) for path in tapes_in(paths)]
    for tape in tapes:
        if tape.lost:
            typer.echo(f"{tape.path}: {tape.lost}", err=True)
    jobs, newest = newest_job(tapes)
    if jobs > 1:
        which = f"these tapes are of {jobs} jobs; this is the newest. For another, name its tapes"
        typer.echo(which, err=True)
    story = story_of(newest)
    rounds = chosen(story, number, fragment, version, everything)
    if number is None and fragment is None and version is None:
        for line in overview(story):
            typer.echo(line)
    for each in rounds:
        typer.echo("")
        for line in sentences(story, each):
            typer.echo(line)


def chosen(
    story: Story,
    number: int | None = None,
    fragment: int | None = None,
    version: int | None = None,
    everything: bool = False,
) -> list[RoundFacts]:
    """The rounds that are asked for; of several, and of none, the newest. Raises ConfigError."""
    rounds = story.decided
    if number is not None:
        if not 1 <= number <= len(rounds):
            rule = f"the tapes have {len(rounds)} decided rounds, counted from 1"
            raise ConfigError("--round", number, rule, "Choose one of them, or leave it out.")
        return [rounds[number - 1]]
    open_ = [each for each in story.rounds.values() if each.commit is None and each.opened]
    found = [
        each
        for each in [*rounds, *sorted(open_, key=lambda each: each.opened or (0, 0))]
        if fragment in (None, each.fragment) and version in (None, each.version)
    ]
    asked = {"--fragment": fragment, "--version": version}
    given = {option: value for option, value in asked.items() if value is not None}
    if given and not found:
        rule = "no round on these tapes is of it"
        remedy = "Give the tapes of all processes, or list the rounds with --all."
        raise ConfigError(" ".join(given), " ".join(map(str, given.values())), rule, remedy)
    return found if everything or len(given) == len(asked) else found[-1:]


def overview(story: Story) -> list[str]:
    """Count the rounds and why they closed; give their times, and notes of what else happened."""
    rounds = story.decided
    lines = [f"{_count(len(rounds), 'decided round')} on these tapes"]
    reasons = Counter(each.commit.reason for each in rounds if each.commit)
    lines += [f"{INDENT}{count} x {reason}" for reason, count in reasons.most_common()]
    times = {
        number: each.decided_ns - each.opened[0]
        for number, each in enumerate(rounds, start=1)
        if each.decided_ns and each.opened
    }
    if times:
        slowest = max(times, key=times.__getitem__)
        lines.append(
            f"{INDENT}open to decided: median {_ms(int(median(times.values())))}, "
            f"most {_ms(times[slowest])} (round {slowest})"
        )
    about_slow = (*SLOW_EVENTS, RackMitigated)
    slow = [note for note in story.notes if isinstance(note[1], about_slow)][-NOTES_SHOWN:]
    lines += [f"{INDENT}{_clock(at_ns)} {event.sentence()}" for at_ns, event in slow]
    notes = [note for note in story.notes if not isinstance(note[1], about_slow)]
    if len(notes) > NOTES_SHOWN:
        lines.append(f"{INDENT}... {_count(len(notes) - NOTES_SHOWN, 'earlier note')}")
    for at_ns, event in notes[-NOTES_SHOWN:]:
        lines.append(f"{INDENT}{_clock(at_ns)} {kind_of(event)}: {event.sentence()}")
    if not story.coordinated:
        lines.append(
            "There is no tape of a coordinator, so the arrival of offers is unknown: also give the "
            "tape of the witness or of rack 0."
        )
    return lines


def sentences(story: Story, made: RoundFacts) -> list[str]:
    """One round: who was in, who was left out and why, when what happened, what it cost."""
    rounds, commit = story.decided, made.commit
    zero_ns = made.opened[0] if made.opened else made.written_ns or made.decided_ns or 0
    what = f"fragment {made.fragment}, version {made.version - 1} -> {made.version}"
    if commit is None:
        lines = [f"open round: {what}, since {_clock(zero_ns)}; it was not decided"]
    else:
        number = rounds.index(made) + 1
        lines = [f"round {number}: {what}, {_clock(zero_ns)}; closed by: {commit.reason}"]
        for share in commit.members:
            lines.append(
                f"  in: rack {share.member.rack}, with {share.tokens} tokens in "
                f"{_count(share.steps, 'step')} up to step {share.capture_step} (offer {share.seq}"
                f"{_age(made, share.base)})"
            )
        inside = {share.member.rack for share in commit.members}
        for rack in story.racks(made.index):
            if rack not in inside:
                lines.append(f"  left out: rack {rack}: {left_out(story, made, rack)}")
    happened = sorted(_timeline(story, made), key=lambda each: each[0])
    lines += [f"  {(at_ns - zero_ns) / MS:+10.1f} ms  {text}" for at_ns, text in happened]
    return [*lines, *(f"  cost: {text}" for text in _costs(made))]


def left_out(story: Story, made: RoundFacts, rack: int) -> str:
    """Say why a member of the job is not one of the round."""
    commit, closed_ns = require(made.commit, "the round has no commit"), made.closed_ns
    for ended in commit.dropped:
        if ended.member.rack == rack:
            return (
                f"its offer {ended.seq} was too old and dropped; the work stays in its weights "
                "and goes into its next offer"
            )
    if rack in made.declined:
        return made.declined[rack]
    for drop in _drops(story, made, rack):
        return drop.reason
    if closed_ns is None or not story.coordinated:
        return "these tapes do not say why"
    facts = _open_offer(story, made, rack)
    if facts is not None and facts.announced_ns <= closed_ns:
        holders = [r for r, since_ns in facts.holders.items() if since_ns <= closed_ns]
        return (
            f"its offer {facts.offer.seq} was announced {_ms(closed_ns - facts.announced_ns)} "
            f"before, but only {_racks(holders)} held it; it stays open for the next round"
        )
    silent = _silence(story, made, rack, closed_ns)
    if facts is not None:
        was, late_ns = f"{silent}, and " if silent else "", facts.announced_ns - closed_ns
        return f"{was}its offer {facts.offer.seq} came {_ms(late_ns)} too late; it stays open"
    last_ns = story.last_heard_ns(rack, closed_ns)
    when = f", last heard {_ms(closed_ns - last_ns)} before" if last_ns is not None else ""
    return (silent or "it had nothing to offer") + when


def _drops(story: Story, made: RoundFacts, rack: int) -> list[Drop]:
    """Return the records that ended the rack's offers of this fragment since its round before."""
    before = [each.index for each in story.decided if each.fragment == made.fragment]
    since = max((index for index in before if index < made.index), default=0)
    return [
        drop
        for index, drop in sorted(story.drops.items())
        if since < index < made.index
        and drop.fragment == made.fragment
        and any(ended.member.rack == rack for ended in drop.dropped)
    ]


def _silence(story: Story, made: RoundFacts, rack: int, closed_ns: int) -> str:
    """Say whether the rack was silent at the close, or when the round opened; empty: neither."""
    heard = story.heard(closed_ns)
    if heard is not None and rack not in heard:
        return "it was silent"
    heard = story.heard(made.opened[0]) if made.opened else None
    if heard is not None and rack not in heard:
        return "it was silent when the round opened"
    return ""


def _open_offer(story: Story, made: RoundFacts, rack: int) -> OfferFacts | None:
    """The first offer of the rack that no record up to this round has ended."""
    ended = 0
    for each in story.decided:
        if each.fragment == made.fragment and each.commit and each.index <= made.index:
            seqs = [one.seq for one in each.commit.members if one.member.rack == rack]
            seqs += [one.seq for one in each.commit.dropped if one.member.rack == rack]
            ended = max([ended, *seqs])
    open_ = [
        facts
        for (of, fragment, seq), facts in story.offers.items()
        if (of, fragment) == (rack, made.fragment) and seq > ended
    ]
    return min(open_, key=lambda facts: facts.offer.seq, default=None)


def _timeline(story: Story, made: RoundFacts) -> list[tuple[int, str]]:
    events: list[tuple[int, str]] = []
    if made.opened:
        events.append((made.opened[0], f"opens: rack {made.opened[1]} has something for it"))
    names = {
        (share.member.rack, share.seq) for share in (made.commit.members if made.commit else ())
    }
    for rack, seq in sorted(names):
        facts = story.offers.get((rack, made.fragment, seq))
        if facts is not None:
            events.append((facts.announced_ns, f"rack {rack}'s offer is announced"))
            events += [
                (since_ns, f"rack {holder} says it has rack {rack}'s offer")
                for holder, since_ns in facts.holders.items()
                if holder != rack
            ]
    for count, (at_ns, _, racks) in enumerate(made.proposals, start=1):
        again = f" (attempt {count})" if count > 1 else ""
        events.append((at_ns, f"closes: merge {_racks(racks)}{again}"))
    events += [
        (at_ns, f"rack {rack} says it holds the result") for rack, at_ns in made.held.items()
    ]
    for at_ns, why in made.whys:
        grace = "; the grace window runs" if why.open_for == "grace" else ""
        events.append((at_ns, why.text + grace))
    if made.written_ns is not None and story.coordinated:
        events.append((made.written_ns, "enough racks hold equal bits: the commit is written"))
    if made.decided_ns is not None:
        events.append((made.decided_ns, "decided"))
    for (rack, rank), facts_of_rank in made.ranks.items():
        events += _of_rank(f"rack {rack}" + (f" rank {rank}" if rank else ""), facts_of_rank)
    return events


def _of_rank(who: str, rank: RankTimes) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    if rank.captured_ns is not None:
        lines.append((rank.captured_ns, f"{who} captures"))
    spans = [(f"pulled from rack {rack}", span) for rack, span in rank.pulls.items()]
    if rank.captured_ns is not None and rank.encoded_ns is not None:
        spans.insert(0, ("encoded", (rank.captured_ns, rank.encoded_ns)))
    if rank.merge is not None:
        spans.append(("merged", rank.merge))
    lines += [
        (to_ns, f"{who} has {what}, in {_ms(to_ns - from_ns)}") for what, (from_ns, to_ns) in spans
    ]
    if rank.applied_ns is not None:
        lines.append((rank.applied_ns, f"{who} trains on it"))
    return lines


def _costs(made: RoundFacts) -> list[str]:
    costs = []
    if made.opened and made.decided_ns is not None:
        costs.append(f"{_ms(made.decided_ns - made.opened[0])} from open to decided")
    pulled = {who: facts.pulled_bytes for who, facts in made.ranks.items() if facts.pulled_bytes}
    if pulled:
        total, ranks = sum(pulled.values()), _count(len(pulled), "rank")
        costs.append(f"{short(total)}B pulled by {ranks}")
    for (rack, rank), facts in sorted(made.ranks.items()):
        if facts.in_mend_ns is not None:
            costs.append(
                f"{_ms(facts.in_mend_ns)} of the training thread of rack {rack} rank {rank}, "
                "from the end of its step until it trained on"
            )
    return costs


def _age(made: RoundFacts, base: int) -> str:
    age = made.version - 1 - base
    return f", {_count(age, 'version')} late" if age else ""


def _racks(racks: Sequence[int]) -> str:
    names = ["the witness" if rack == WITNESS else str(rack) for rack in sorted(racks)]
    return f"rack{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else "nobody"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ms(ns: int) -> str:
    return f"{ns / SECOND:.2f} s" if ns >= 10 * SECOND else f"{ns / MS:.1f} ms"


def _clock(ns: int) -> str:
    return datetime.fromtimestamp(ns / SECOND, UTC).strftime("%H:%M:%S.%f")[:-3] + " UTC"
