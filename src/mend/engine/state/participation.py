"""How many of the live racks each round has merged."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from mend.consensus.records import Commit, MergeMember
from mend.events.kinds import LastRoundsAlone
from mend.types import SECOND

ROUNDS_RECENT = 20
"""The newest rounds, which a warning is about."""

ROUNDS_LEAST = 10
"""Recent rounds without which there is no warning."""

SHORT_NS = 30 * SECOND
"""For how long most recent rounds must be short before there is a warning. It asks a person for
other settings, and a busy moment is no reason to change them."""

ALONE_LEAST = 3
"""Number of last rounds of one fragment that merged a single rack, from which on there is a
warning. A rack that ends up to a period after the others has two: its next capture, and its closing
one."""

ALONE_PCT_LEAST = 10
"""Minimum share of all merged tokens that these rounds have, for such a warning: what a slower rack
still does after the others have ended moves the model little."""

Round = tuple[int, int]
"""(racks merged, racks that lived). 0 lived: not known, as of rounds before this rack trained."""


@dataclass
class Participation:
    """The rounds of one job, as one rank sees them."""

    by_racks: Counter[int] = field(default_factory=Counter)
    """Members -> rounds, of all rounds."""
    recent: deque[Round] = field(default_factory=lambda: deque(maxlen=ROUNDS_RECENT))
    warned: bool = False
    short_since_ns: int | None = None
    """Since when more than half of the recent rounds were short; None: they were not."""

    def add(self, members: Collection[int], live: Collection[int]) -> Round:
        """Count a round. `live`: the racks that lived when it closed; empty: not known."""
        round_ = (len(members), len({*members, *live}) if live else 0)
        self.by_racks[len(members)] += 1
        self.recent.append(round_)
        return round_

    def warning(self, now_ns: int) -> str:
        """The warning, once, when more than half of the recent rounds have been short for SHORT_NS;
        else empty. It comes again only after less than a quarter of them were short."""
        count, short = len(self.recent), short_of(self.recent)
        self.warned = self.warned and 4 * short >= count
        if count < ROUNDS_LEAST or 2 * short <= count:
            self.short_since_ns = None
            return ""
        if self.short_since_ns is None:
            self.short_since_ns = now_ns
        if self.warned or now_ns - self.short_since_ns < SHORT_NS:
            return ""
        self.warned = True
        return describe_rounds(self.recent)


@dataclass
class LastRounds:
    """The unbroken run of rounds of weights, at the end of the log, that merged the same single
    rack."""

    rounds: Counter[int] = field(default_factory=Counter)
    """Fragment -> such rounds."""
    tokens: Counter[int] = field(default_factory=Counter)
    """Fragment -> what these rounds merged."""
    merged: Counter[int] = field(default_factory=Counter)
    """Fragment -> what all rounds merged."""
    first: MergeMember | None = None
    """The share that the first of them merged; None: the newest round merged several racks."""
    newest: dict[int, MergeMember] = field(default_factory=dict)
    """Rack -> its closing share, of any fragment; without one, the share that was merged last."""

    def add(self, commit: Commit) -> None:
        """Take the next commit of weights."""
        racks = [share.member.rack for share in commit.members]
        if self.first is None or racks != [self.first.member.rack]:
            self.rounds.clear()
            self.tokens.clear()
            self.first = commit.members[0] if len(racks) == 1 else None
        if self.first is not None:
            self.rounds[commit.fragment] += 1
            self.tokens[commit.fragment] += commit.members[0].tokens
        for share in commit.members:
            self.merged[commit.fragment] += share.tokens
            known = self.newest.get(share.member.rack)
            if known is None or known.member != share.member or not known.closing:
                self.newest[share.member.rack] = share

    def alone(self) -> LastRoundsAlone | None:
        """The warning that one rack has trained on alone. None: no rack has, or for less than
        ALONE_LEAST rounds of a fragment or ALONE_PCT_LEAST of its tokens, or no other rack was ever
        merged."""
        enough = max(self.rounds.values(), default=0) >= ALONE_LEAST and any(
            100 * tokens >= ALONE_PCT_LEAST * self.merged[fragment]
            for fragment, tokens in self.tokens.items()
        )
        if self.first is None or not enough:
            return None
        rack = self.first.member.rack
        others = {other: share for other, share in self.newest.items() if other != rack}
        if not others:
            return None
        ends = [
            f"rack {other} {'ended' if share.closing else 'was last merged'} at its step "
            f"{share.capture_step}"
            for other, share in sorted(others.items())
        ]
        return LastRoundsAlone(
            alone=rack,
            rounds=self.rounds.total(),
            tokens=max(self.tokens.values()),
            since_step=self.first.capture_step,
            others=tuple(ends),
        )

    def in_words(self) -> str:
        """The same for an outcome; empty: no rack has trained on alone."""
        about = self.alone()
        if about is None:
            return ""
        return (
            f"the last {about.rounds} rounds merged rack {about.alone} alone, {about.tokens} "
            f"tokens, from its capture at step {about.since_step} on ({'; '.join(about.others)})"
        )


def short_of(rounds: Iterable[Round]) -> int:
    """The number of rounds that merged fewer racks than lived."""
    return sum(members < live for members, live in rounds)


def describe_rounds(rounds: Iterable[Round]) -> str:
    """`9 of 10 rounds merged 1 of 2 live racks`; empty if the live racks are known for no round."""
    found = [(members, live) for members, live in rounds if live]
    short = [(members, live) for members, live in found if members < live]
    if not found:
        return ""
    if not short:
        return f"{_rounds(len(found))} merged every live rack"
    return (
        f"{len(short)} of {_rounds(len(found))} merged {_span(members for members, _ in short)} "
        f"of {_span(live for _, live in short)} live racks"
    )


def _rounds(count: int) -> str:
    return f"{count} round{'s' * (count != 1)}"


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
