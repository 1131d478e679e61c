"""reference: the whole algorithm on one page (and the radial mean on another), to read and to test
against. One process, no speed.

Several racks train one model, each on its own data. The model is cut into fragments. Every H steps
each rack offers, per fragment, how far it has moved from the last common anchor; the offers are
averaged into the next anchor; tau steps later the racks move under it, keeping what they learnt
meanwhile. Whole vectors, formulas as in the papers, fp64 where it is promised. Imports nothing of
mend on purpose: equal bits then mean that two independent programs agree.

`lockstep` runs the schedule with every rack in every round. `replay` follows what a real run
decided (commits) and what its racks did (facts), and must arrive at the same bits.

Legend: N elements of a fragment; p a fragment; theta parameters; A anchor; D delta; e residual; y
an offer, decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from mend_lab.reference import payloads
from mend_lab.reference.low_rank import Factors, Fragment, rank_of
from mend_lab.reference.radial import fp32, radial

MOMENTUM_WAITS = Fraction(-3, 20)  # mean balance of signs below which a merge has no momentum


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all racks agree on. `fragments[p]` lists the indices of the parameters in fragment p."""

    fragments: Sequence[Sequence[int]]
    period: int  # H: each fragment is captured once per H steps
    overlap: int  # tau < H: what is captured at step s is applied at s + tau
    overlap_ramp: int = 0  # c > 0: tau rises with the versions, see `tau`
    apply_mode: str = "carry"  # or "overwrite", "blend"
    alpha: float = 0.5  # blend only: the part of the rack's own deviation that it keeps
    outer_lr: float = 1.0
    momentum: float = 0.0
    ramp: int = 0  # c > 0: after k rounds the momentum is k / (k + c), at most `momentum`
    payload: str = "float32"  # or what else `payloads.sent` knows, or powersgd-1 to powersgd-64
    ranks: int = 1  # of a rack: each sends its own part of every parameter
    token_weighted: bool = True  # each step by its tokens, and stretched; else alike
    radial: Collection[int] = ()  # parameters merged by length and direction; the rest by the mean

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.period:
            raise ValueError(f"overlap={self.overlap} must be in [0, period={self.period})")
        if self.apply_mode not in ("carry", "overwrite", "blend"):
            raise ValueError(f"apply_mode={self.apply_mode!r}, not carry, overwrite or blend")

    @property
    def in_weights(self) -> bool:
        """Whether what a payload cannot carry stays in the rack's weights, and not in e."""
        extreme = self.payload == "topk" or rank_of(self.payload) > 0
        return extreme and self.apply_mode == "carry"

    def tau(self, version: int) -> int:
        """Of a capture on this version: tau v / (0.9 (v + c)), rounded, from 1 to tau."""
        if self.overlap <= 1 or not self.overlap_ramp:
            return self.overlap
        risen = Fraction(10 * self.overlap * version, 9 * (version + self.overlap_ramp))
        return min(self.overlap, max(1, math.floor(risen + Fraction(1, 2))))

    def due(self, fragment: int, step: int) -> bool:
        """Steps count from 1. Fragment p is captured at o, o + H, ...; o = floor((p+1) H / P)."""
        first = (fragment + 1) * self.period // len(self.fragments)
        return step >= max(first, 1) and (step - first) % self.period == 0


@dataclass(frozen=True)
class Rack:
    """One learner: its parameters, and one step on them, in place, that returns its tokens."""

    parameters: Sequence[Tensor]
    train: Callable[[int], int]


@dataclass(frozen=True)
class Captured:
    step: int
    fragment: int
    seq: int
    closing: bool = False  # the last one; with feedback in the weights it goes as fp32


@dataclass(frozen=True)
class Applied:
    step: int
    fragment: int
    version: int


@dataclass(frozen=True)
class Discarded:
    """The rack forgot its open offer: refused at home, or dropped without a commit."""

    step: int
    fragment: int
    seq: int


Event = Captured | Applied | Discarded


@dataclass(frozen=True)
class Facts:
    """The number of steps of one rack, and its events in order."""

    steps: int
    events: Sequence[Event]


@dataclass(frozen=True)
class Named:
    """A member of a commit: one rack's offer."""

    rack: int
    seq: int
    base: int  # version of the anchor the delta was measured from
    tokens: int
    steps: int


@dataclass(frozen=True)
class Commit:
    """The decision that `version` is made out of the offers of `members`, in ascending rack."""

    fragment: int
    version: int
    members: Sequence[Named]
    dropped: Sequence[tuple[int, int]] = ()  # (rack, seq) of offers that will never be merged
    absent: Sequence[tuple[int, int]] = ()  # (tokens, steps) of racks that train beside those in it
    training: bool = False  # whether one of the absent trains on


@dataclass(frozen=True)
class Anchor:
    version: int
    values: Tensor  # fp32 N
    state: Tensor | None  # fp32 N, outer momentum
    rounds: Fraction = Fraction(0)  # k: merged so far; one that missed racks counts in part


@dataclass(frozen=True)
class Start:
    """The start of a job: from scratch, or from a checkpoint right after a merge of everything."""

    version: int = 0  # of every fragment
    rounds: Fraction = Fraction(0)  # merged by then
    seq: int = 0  # of the last offer of every rack and fragment


@dataclass(frozen=True)
class Outcome:
    """anchors[p][version]; thetas[rack][p], fp32, at the end; the commits and facts of the run."""

    anchors: list[list[Anchor]]
    thetas: list[list[Tensor]]
    commits: list[Commit]
    facts: list[Facts]
    low_rank: Sequence[Fragment] = ()  # their bases, where payloads are of low rank


# ---------------------------------------------------------------------------------- the arithmetic


def shares(members: Sequence[Named], settings: Settings) -> list[float]:
    """By the batch, exact until each is rounded to fp32: a delta of n steps is n steps long."""
    batches = [Fraction(m.tokens, m.steps) if settings.token_weighted else 1 for m in members]
    return [fp32(Fraction(batch) / sum(batches)) for batch in batches]


def counted(tokens: int, steps: int, settings: Settings) -> Fraction:
    """Tokens of a period at most."""
    spanned = min(Fraction(1), Fraction(settings.period, steps))
    return tokens * spanned if settings.token_weighted else Fraction(1)


def stretch(members: Sequence[Named], settings: Settings) -> float:
    """f = mean of steps by counted tokens / mean of steps by batches, in [1, R], fp32."""
    if not settings.token_weighted:
        return 1.0
    counts = [counted(m.tokens, m.steps, settings) for m in members]
    behind = sum(c * m.steps for c, m in zip(counts, members, strict=True)) / sum(counts)
    long = Fraction(sum(m.tokens for m in members)) / sum(
        Fraction(m.tokens, m.steps) for m in members
    )
    return fp32(min(max(behind / long, Fraction(1)), Fraction(len(members))))


def balance(sent: Tensor, momentum: Tensor | None) -> Fraction:
    """(along - against) / (along + against): elements of an offer with the sign of the momentum of
    its base, and with the other one; 0 where nothing is compared."""
    if momentum is None:
        return Fraction(0)
    signs = torch.sign(sent) * torch.sign(momentum)
    along, against = int((signs > 0).sum()), int((signs < 0).sum())
    return Fraction(along - against, (along + against) or 1)


def part(commit: Commit, settings: Settings) -> Fraction:
    """s = named / (named + absent), a multiple of 2^-24, which is an fp32 number."""
    named = sum(counted(m.tokens, m.steps, settings) for m in commit.members)
    absent = sum(counted(*work, settings) for work in commit.absent)
    return Fraction(max(1, round(2**24 * named / (named + absent))), 2**24)


def merge(offers: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Delta = sum_m w_m y_m: fp64, in the order given, rounded to fp32 once at the end."""
    total = offers[0].double() * weights[0]
    for offer, weight in zip(offers[1:], weights[1:], strict=True):
        total = total + offer.double() * weight
    return total.float()


def outer_step(
    anchor: Anchor, delta: Tensor, settings: Settings, s: Fraction = Fraction(1),
    plain: bool = False, f: float = 1.0, waits: bool = False,
) -> Anchor:  # fmt: skip
    """b <- (1 - s (1 - mu)) b + s Delta;  A' = A - s lr (f Delta + mu b): fp32, every product and
    every sum rounded. `waits`, as the offers point against b: A' = A - s lr f Delta. `plain`, for
    one rack with nobody absent and for last offers: A' = A - s f Delta, and b is kept for later,
    f = 1."""
    lr, mu, k = fp32(settings.outer_lr), fp32(settings.momentum), anchor.rounds
    if settings.ramp:
        mu = min(fp32(k / (k + settings.ramp)), mu)
    momentum, step = anchor.state, delta * f
    if momentum is not None and plain:
        lr = 1.0
    elif momentum is not None:
        momentum = momentum * fp32(1 - s * (1 - Fraction(mu))) + delta * float(s)
        step = delta * f if waits else delta * f + momentum * mu
    values = anchor.values - step * fp32(s * Fraction(lr))
    return Anchor(anchor.version + 1, values, momentum, k + s)


def aligned(
    theta: Tensor, old: Tensor, new: Tensor, delta: Tensor | None, settings: Settings
) -> Tensor:
    """The parameters under the new anchor. `delta`: this rack's offer if it is in it, else None."""
    if delta is None:
        return new + (theta - old)  # nothing of ours was merged: carry all of it
    if settings.apply_mode == "carry":
        captured = old - delta
        return new + (theta - captured)  # carry what was learnt since
    if settings.apply_mode == "overwrite":
        return new.clone()
    return new + (theta - new) * fp32(settings.alpha)


# ----------------------------------------------------------------------------------- racks and log


@dataclass(frozen=True)
class _Offer:
    member: Named
    delta: Tensor  # A - theta at capture
    sent: Tensor  # y, what the others decode
    pend: Tensor | None  # x - y: becomes the residual if, and only if, a commit names the offer
    totals: tuple[int, int]  # tokens and steps that are merged with it
    factors: Factors | None = None
    closing: bool = False
    balance: Fraction = Fraction(0)


@dataclass
class _Part:
    """One fragment as one rack sees it."""

    anchor: Anchor
    residual: Tensor | None = None  # e: what earlier payloads could not carry
    seq: int = 0
    mark: tuple[int, int] = (0, 0)  # (tokens, steps) that are merged, or were given up by overwrite
    offer: _Offer | None = None


@dataclass
class _Log:
    """The global state: anchors by version, the commits that made them, every offer ever sent."""

    settings: Settings
    numels: list[int]  # of the parameters
    low_rank: list[Fragment]  # of all fragments, where payloads are of low rank
    anchors: list[list[Anchor]]
    commits: dict[tuple[int, int], Commit] = field(default_factory=dict)
    offers: dict[tuple[int, int, int], _Offer] = field(default_factory=dict)  # rack, p, seq

    def parts(self, fragment: int) -> list[Tensor]:
        """Of each rank, the elements of the fragment that it owns, in their order there."""
        ranks, spans, start = self.settings.ranks, [], 0
        for numel in (self.numels[i] for i in self.settings.fragments[fragment]):
            spans.append([start + numel * r // ranks for r in range(ranks + 1)])
            start += numel
        return [
            torch.cat([torch.arange(cuts[r], cuts[r + 1]) for cuts in spans]) for r in range(ranks)
        ]

    def complete(self, commit: Commit) -> bool:
        return all((m.rack, commit.fragment, m.seq) in self.offers for m in commit.members)

    def extend(self, commit: Commit) -> None:
        versions = self.anchors[commit.fragment]
        assert commit.version == len(versions), f"{commit} is not version {len(versions)}"
        racks = [m.rack for m in commit.members]
        assert racks == sorted(set(racks)), f"members must ascend: {racks}"
        offers = [self.offers[m.rack, commit.fragment, m.seq] for m in commit.members]
        for member, offer in zip(commit.members, offers, strict=True):
            assert member == offer.member, f"{member} was offered as {offer.member}"
        weights = shares(commit.members, self.settings)
        delta = self.merged(commit.fragment, [offer.sent for offer in offers], weights)
        s = part(commit, self.settings)
        last = not commit.training and all(offer.closing for offer in offers)
        plain = last or (len(racks) == 1 and s == 1)
        f = 1.0 if last else stretch(commit.members, self.settings)  # last: what the racks hold
        pairs = zip(weights, offers, strict=True)
        waits = sum(Fraction(w) * o.balance for w, o in pairs) < MOMENTUM_WAITS
        versions.append(outer_step(versions[-1], delta, self.settings, s, plain, f, waits))
        if self.low_rank:
            both = zip(offers, weights, strict=True)
            sent = [(o.member.base, o.factors, w) for o, w in both if o.factors is not None]
            self.low_rank[commit.fragment].merged(commit.version - 1, sent)
        self.commits[commit.fragment, commit.version] = commit

    def merged(self, fragment: int, offers: list[Tensor], weights: list[float]) -> Tensor:
        """Tensor by tensor, as each has weights of its own."""
        parts, start = [], 0
        for parameter in self.settings.fragments[fragment]:
            part = [offer[start : start + self.numels[parameter]] for offer in offers]
            chosen = radial(part, weights) if parameter in self.settings.radial else weights
            parts.append(merge(part, chosen))
            start += self.numels[parameter]
        return torch.cat(parts)


class _Learner:
    def __init__(self, number: int, rack: Rack, log: _Log, seq: int) -> None:
        self.number, self.rack, self.log, self.settings = number, rack, log, log.settings
        self.totals = self.before = (0, 0)  # tokens and steps, now and before the last step
        self.events: list[Event] = []
        self.parts = [_Part(a[-1], seq=seq) for a in log.anchors]
        for p, part in enumerate(self.parts):
            assert torch.equal(self.theta(p), part.anchor.values), f"rack {number} starts elsewhere"

    def theta(self, fragment: int) -> Tensor:
        return _flat(self.rack, self.settings.fragments[fragment])

    def train(self, step: int) -> None:
        tokens, self.before = self.rack.train(step), self.totals
        self.totals = (self.totals[0] + tokens, self.totals[1] + 1)

    def capture(self, fragment: int, step: int, closing: bool = False) -> _Offer:
        """With feedback in the weights the last step is left to the next offer, as some work must
        be left to the closing one."""
        part, keeps = self.parts[fragment], self.settings.in_weights
        totals = self.before if keeps and not closing else self.totals
        assert part.offer is None, f"rack {self.number} has an open offer of fragment {fragment}"
        tokens, steps = totals[0] - part.mark[0], totals[1] - part.mark[1]
        assert min(tokens, steps) >= 1, f"rack {self.number} has {tokens=} {steps=} to offer"
        delta = part.anchor.values - self.theta(fragment)
        x = delta if part.residual is None else delta + part.residual
        sent, factors = (x, None) if closing and keeps else self.sent(fragment, x)
        part.seq += 1
        exact = self.settings.payload in ("float32", "sparse")
        pend = None if exact or keeps else x - sent
        member = Named(self.number, part.seq, part.anchor.version, tokens, steps)
        turned = balance(sent, part.anchor.state)
        part.offer = _Offer(member, delta, sent, pend, totals, factors, closing, turned)
        self.log.offers[self.number, fragment, part.seq] = part.offer
        self.events.append(Captured(step, fragment, part.seq, closing))
        return part.offer

    def sent(self, fragment: int, x: Tensor) -> tuple[Tensor, Factors | None]:
        """Every rank encodes its parts of all parameters of the fragment, end to end."""
        if self.log.low_rank:
            return self.log.low_rank[fragment].sent(x, self.parts[fragment].anchor.version)
        sent = torch.empty_like(x)
        for own in self.log.parts(fragment):
            sent[own] = payloads.sent(x[own], self.settings.payload)
        return sent, None

    def apply(self, fragment: int, version: int, step: int) -> None:
        """Go to anchor `version`; the commits on the way tell what became of the open offer."""
        part, new = self.parts[fragment], self.log.anchors[fragment][version]
        old = part.anchor
        assert version > old.version, f"version {version} after {old.version}"
        passed = [self.log.commits[fragment, v] for v in range(old.version + 1, version + 1)]
        me = (self.number, part.seq)
        merged = any((m.rack, m.seq) == me for commit in passed for m in commit.members)
        named = part.offer if merged else None
        delta = named.delta if named else None
        if named and self.settings.in_weights:
            delta = named.sent  # the rest of it stays in theta
        theta = aligned(self.theta(fragment), old.values, new.values, delta, self.settings)
        _store(self.rack, self.settings.fragments[fragment], theta)
        if named:
            part.residual = named.pend
            part.mark = self.totals if self.settings.apply_mode == "overwrite" else named.totals
            part.offer = None
        elif any(me in commit.dropped for commit in passed):
            part.offer = None  # as if never sent: residual and mark stay
        part.anchor = new
        self.events.append(Applied(step, fragment, version))

    def discard(self, event: Discarded) -> None:
        part = self.parts[event.fragment]
        assert part.offer is not None, f"{event} without an open offer"
        assert part.offer.member.seq == event.seq, f"{event} of {part.offer.member}"
        part.offer = None  # as if never sent
        self.events.append(event)


def _flat(rack: Rack, indices: Sequence[int]) -> Tensor:
    return torch.cat([rack.parameters[i].detach().reshape(-1).float() for i in indices])


@torch.no_grad()
def _store(rack: Rack, indices: Sequence[int], theta: Tensor) -> None:
    offset = 0
    for tensor in (rack.parameters[i] for i in indices):
        tensor.detach().copy_(theta[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
    assert offset == theta.numel(), "a fragment and its parameters differ in size"


def _start(racks: Sequence[Rack], settings: Settings, start: Start) -> tuple[_Log, list[_Learner]]:
    first = [_flat(racks[0], indices) for indices in settings.fragments]
    states = [torch.zeros_like(v) if fp32(settings.momentum) else None for v in first]
    pairs = zip(first, states, strict=True)
    begun = [Anchor(start.version, v, b, start.rounds) for v, b in pairs]
    anchors = [[each] * (start.version + 1) for each in begun]  # older ones are nobody's any more
    shapes = [[racks[0].parameters[i].shape for i in indices] for indices in settings.fragments]
    rank = rank_of(settings.payload)
    low = [Fragment(each, settings.ranks, rank) for each in shapes] if rank else []
    log = _Log(settings, [p.numel() for p in racks[0].parameters], low, anchors)
    return log, [_Learner(number, rack, log, start.seq) for number, rack in enumerate(racks)]


def _outcome(log: _Log, learners: list[_Learner]) -> Outcome:
    thetas = [[x.theta(p) for p in range(len(log.anchors))] for x in learners]
    facts = [Facts(x.totals[1], tuple(x.events)) for x in learners]
    return Outcome(log.anchors, thetas, list(log.commits.values()), facts, log.low_rank)


# -------------------------------------------------------------------------------- the two programs


def lockstep(racks: Sequence[Rack], settings: Settings, steps: int) -> Outcome:
    """All racks side by side; a commit names all offers of a capture, and is applied tau later."""
    log, learners = _start(racks, settings, Start())
    ends: dict[int, int] = {}  # fragment -> the step at which its overlap ends
    for step in range(1, steps + 1):
        for learner in learners:
            learner.train(step)
        for p in range(len(settings.fragments)):
            if ends.get(p) == step:
                _apply_newest(log, learners, p, step)
        for p in range(len(settings.fragments)):
            if settings.due(p, step):
                ends[p] = step + settings.tau(len(log.anchors[p]) - 1)
                members = [learner.capture(p, step).member for learner in learners]
                log.extend(Commit(p, len(log.anchors[p]), members))
                if settings.overlap == 0:
                    _apply_newest(log, learners, p, step)
    return _outcome(log, learners)


def _apply_newest(log: _Log, learners: list[_Learner], fragment: int, step: int) -> None:
    for learner in learners:
        learner.apply(fragment, len(log.anchors[fragment]) - 1, step)


def replay(
    racks: Sequence[Rack],
    settings: Settings,
    facts: Sequence[Facts],
    commits: Sequence[Commit],
    start: Start = Start(),
) -> Outcome:
    """Do again what a run did: every rack on its own, waiting only for the others' offers. With a
    `start` without bases of payloads of low rank.

    Raises AssertionError where facts, commits and the training contradict each other.
    """
    log, learners = _start(racks, settings, start)
    waiting = sorted(commits, key=lambda c: (c.fragment, c.version))
    running = [_follow(learner, facts[number], log) for number, learner in enumerate(learners)]
    while running:
        before = (len(running), len(waiting), [len(x.events) for x in learners])
        running = [run for run in running if next(run, "ended") != "ended"]
        waiting = _extend_all(log, waiting)
        after = (len(running), len(waiting), [len(x.events) for x in learners])
        assert before != after, f"stuck: nobody makes the offers of {waiting[:2]}"
    assert not waiting, f"commits of offers nobody made: {waiting[:2]}"
    return _outcome(log, learners)


def _extend_all(log: _Log, waiting: list[Commit]) -> list[Commit]:
    """Carry out the commits, per fragment in order, whose offers exist; return the others."""
    left: list[Commit] = []
    blocked: set[int] = set()
    for commit in waiting:
        if commit.fragment in blocked or not log.complete(commit):
            blocked.add(commit.fragment)
            left.append(commit)
        else:
            log.extend(commit)
    return left


def _follow(learner: _Learner, facts: Facts, log: _Log) -> Iterator[str]:
    """One rack's run. Yields while it waits for an anchor."""
    queue = list(facts.events)
    for step in range(1, facts.steps + 1):
        learner.train(step)
        while queue and queue[0].step == step:
            event = queue.pop(0)
            if isinstance(event, Captured):
                offer = learner.capture(event.fragment, step, event.closing)
                assert offer.member.seq == event.seq, f"{event} came out as {offer.member}"
            elif isinstance(event, Discarded):
                learner.discard(event)
            else:
                while event.version >= len(log.anchors[event.fragment]):
                    yield "waiting"
                learner.apply(event.fragment, event.version, step)
    assert not queue, f"events out of order or after the last step: {queue[:2]}"
