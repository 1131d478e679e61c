"""benchmarks.quality_gpu_outer: the arms of the batched quality bench, and mend's outer rule on
whole fragments. Which rack is captured when, what a merge makes of it, how the racks move under it.

Written as: KIND[:KEY=VALUE]...

dp           one model per seed: the gradients of all racks averaged in every step
alone        no exchange; its loss is the mean of the racks' own
merge        every rack in every round
turns        one rack per round, each captured R times as seldom as rounds come
straggler    the last rack is in every fourth round only, with four periods of movement

H=64         steps between two captures of a fragment by one rack
early=8/.3   H 8 in the first .3 of the steps after the warm start, tau at most a quarter of it, and
             the momentum at most mend's default for it; early=8/.3/.5: at most .5
late=8/.05   the same in the last .05 of them
spread=1     0: all fragments are captured at once, at H
tau=0        steps from a capture to its apply (carry: what was learnt meanwhile is kept)
lr=1         outer learning rate; lr=1-.7: from 1 to .7 as the ramp rises
mu=0         outer Nesterov momentum; with a ramp the value at its end
cap=1        most momentum at any time: mu=.9:cap=.8:ramp=10 is mend's ramp, min(k / (k + 10), .8)
muend=1      most momentum when the inner rate has fallen to its end; it falls there with the rate
lrend=1      factor of lr then, likewise
rate=1       factor of the inner learning rate, of dp and alone, too (after the warm start)
moments=none     moments=m: a merge averages the inner optimizer's first moments of its fragment,
                 moments=mv: the second ones, too, both as if at the capture
ramp=0       c > 0: the ramp is min(k / (k + c), .9) / .9 of the way, k rounds merged before this
             one; 0: at its end from the first round
merge=mean       merge=rda: per tensor the mean length in the mean direction, embeddings by the mean
weight=tokens    an offer counts tokens^2 / steps; weight=period: that, per period it spans;
                 weight=alike: as any other; weight=nova: alike, and the step as long as by period
                 (FedNova, arXiv 2007.07481)
divisor=named    a merge divides by the weight of those in it; divisor=live: by that of all racks;
                 divisor=even: R racks of n steps make (sum n)^2 / (R sum n^2) of a round;
                 divisor=damped: that, of the momentum's step only
against=0        rows of so many elements of a fragment (at most all of it) take the step of the
                 mean where the merged delta points against the momentum; 0: none does
limit=0          cosine of the two below which it does
rise=0           c > 0: tau rises with the rounds, round(tau min(k / (k + c), .9) / .9)
codec=none       bf16, int8, int4, e3m0, topk, powersgd-4 (any rank): how offers travel
feedback=buffer  what the codec left out is added to the rack's next offer; feedback=none: it is
                 lost; feedback=weights: it stays in the rack's weights
speeds=1/.7      share of the steps that each rack makes, the last one counts for all further racks;
                 captures are at the same moments for all (default 1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality_gpu_codecs import LowRank, rank_of, sent
from benchmarks.quality_gpu_model import EMBEDDINGS, Slot
from mend.config.pair_warnings import default_momentum

KINDS = ("dp", "alone", "merge", "turns", "straggler")
EVERY = 4
"""Rounds per offer of the straggler."""
RAMP_END = 0.9
RATE_END = 0.1
"""Of the inner learning rate's peak, at the end."""

Stretch = tuple[int, float, float | None]
"""(H, share of the steps, most momentum or None: mend's default)"""
Moments = Callable[[int], Sequence[tuple[float, Tensor]]]
"""Leaf -> (decay a step, [S, R, N]) of each moment of the inner optimizer that is averaged."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps with one H, from the one after `begin` on. `momentum`: the most of it."""

    begin: int
    period: int
    overlap: int
    momentum: float = 1.0


@dataclass(frozen=True, slots=True)
class Course:
    """Steps of a run, and how many of them are the warm start."""

    steps: int = 0
    warm: int = 0

    @property
    def length(self) -> int:
        return self.steps - self.warm

    def cooled(self, step: int) -> float:
        """How far the inner rate has fallen `step` steps behind the warm start, 0 to 1."""
        at = min(step, self.length) + self.warm
        if at <= max(1, self.steps // 10):
            return 0.0
        return (1 - learning_rate(at, self.steps, 1.0)) / (1 - RATE_END)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to train. `lr`: at the start and at the end of the ramp."""

    kind: str
    period: int = 64
    overlap: int = 0
    lr: tuple[float, float] = (1.0, 1.0)
    momentum: float = 0.0
    ramp: float = 0.0
    merge: str = "mean"
    weight: str = "tokens"
    divisor: str = "named"
    against: int = 0
    limit: float = 0.0
    rise: float = 0.0
    codec: str = "none"
    feedback: str = "buffer"
    speeds: tuple[Fraction, ...] = (Fraction(1),)
    early: Stretch = (1, 0.0, None)
    late: Stretch = (1, 0.0, None)
    spread: int = 1
    cap: float = 1.0
    momentum_end: float = 1.0
    lr_end: float = 1.0
    rate: float = 1.0
    moments: str = "none"

    def __post_init__(self) -> None:
        wrong = {
            "kind": self.kind not in KINDS,
            "H": self.period < 1,
            "tau": not 0 <= self.overlap < self.period,
            "mu": not 0 <= self.momentum < 1,
            "ramp": self.ramp < 0,
            "merge": self.merge not in ("mean", "rda"),
            "weight": self.weight not in ("tokens", "period", "alike", "nova"),
            "divisor": self.divisor not in ("named", "live", "even", "damped"),
            "against": self.against < 0,
            "limit": not -1 <= self.limit <= 1,
            "rise": self.rise < 0,
            "feedback": self.feedback not in ("buffer", "none", "weights"),
            "speeds": not all(0 < speed <= 1 for speed in self.speeds),
            "early, late": self.early[1] + self.late[1] > 1 or not self._stretched,
            "spread": self.spread not in (0, 1),
            "cap, muend, lrend": not all(0 <= v <= 1 for v in self._ends),
            "rate": self.rate <= 0,
            "moments": self.moments not in ("none", "m", "mv"),
        }
        if bad := [key for key, is_wrong in wrong.items() if is_wrong]:
            raise ValueError(f"{', '.join(bad)} out of range in {self}")
        rank_of(self.codec)

    @property
    def _stretched(self) -> bool:
        """Whether `early` and `late` make sense, if they are there."""
        there = [each for each in (self.early, self.late) if each[1]]
        return all(
            self.kind == "merge" and period >= 1 and share > 0 and 0 <= (most or 0) <= 1
            for period, share, most in there
        )

    @property
    def _ends(self) -> tuple[float, float, float]:
        return self.cap, self.momentum_end, self.lr_end

    def stages(self, length: int, racks: int) -> list[Stage]:
        """All stages of a run of `length` steps behind its warm start, in order."""
        found, main = [], Stage(0, self.period, self.overlap)
        if self.early[1]:
            found.append(self._stage(0, self.early, racks))
            main = Stage(round(self.early[1] * length), self.period, self.overlap)
        found.append(main)
        if self.late[1]:
            begin = length - round(self.late[1] * length)
            found.append(self._stage(begin, self.late, racks))
        return found

    def _stage(self, begin: int, stretch: Stretch, racks: int) -> Stage:
        period, _, most = stretch
        if most is None:
            most = default_momentum(period, racks)
        return Stage(begin, period, min(self.overlap, period // 4), most)

    @property
    def exchanges(self) -> bool:
        return self.kind not in ("dp", "alone")

    def trained(self, rack: int, step: int) -> int:
        """Steps that a rack has made when the fastest one has made `step`; all make the first."""
        return math.ceil(step * self.speed(rack))

    def speed(self, rack: int) -> Fraction:
        return self.speeds[min(rack, len(self.speeds) - 1)]

    def shares(self, steps: Sequence[int]) -> list[float]:
        """The weight of each offer of so many steps in a merge: 1 in all, unless by `nova`."""
        if self.weight in ("alike", "nova"):
            alike = [Fraction(1, len(steps))] * len(steps)
            longer = self._moved(self._by_steps(steps), steps) / self._moved(alike, steps)
            return [float(each * longer if self.weight == "nova" else each) for each in alike]
        return [float(each) for each in self._by_steps(steps)]

    def _by_steps(self, steps: Sequence[int]) -> list[Fraction]:
        most = math.inf if self.weight == "tokens" else self.period
        counted = [Fraction(min(each, most)) for each in steps]
        return [each / sum(counted) for each in counted]

    @staticmethod
    def _moved(shares: Sequence[Fraction], steps: Sequence[int]) -> Fraction:
        return sum((a * b for a, b in zip(shares, steps, strict=True)), Fraction(0))

    def outer(
        self, rounds: Fraction, cooled: float = 0.0, most: float = 1.0
    ) -> tuple[float, float]:
        """(lr, mu) of a round before which `rounds` were merged, with the inner rate `cooled` of
        the way down, and at most that momentum."""
        share, top = _risen(rounds, self.ramp), min(self.momentum, self.cap)
        lr = self.lr[0] + (self.lr[1] - self.lr[0]) * share
        falling = top + (self.momentum_end - top) * cooled
        mu = min(self.momentum * share, self.cap, most, falling)
        return lr * (1 + (self.lr_end - 1) * cooled), mu


def _risen(rounds: Fraction, ramp: float) -> float:
    """Return how far a ramp is after so many rounds, 0 to 1."""
    return min(float(rounds) / (float(rounds) + ramp), RAMP_END) / RAMP_END if ramp else 1.0


def parse_arm(text: str) -> Arm:
    """Parse an arm. Raises ValueError that names the word that makes no sense."""
    kind, *words = text.split(":")
    kept: dict[str, Any] = {"kind": kind}
    for word in words:
        key, _, value = word.partition("=")
        if key not in _KEYS:
            raise ValueError(f"{word!r} of {text!r}: there are {', '.join(_KEYS)}")
        name, read = _KEYS[key]
        kept[name] = read(value)
    return Arm(**kept)


def _rates(text: str) -> tuple[float, float]:
    first, _, last = text.partition("-")
    return float(first), float(last or first)


def _speeds(text: str) -> tuple[Fraction, ...]:
    return tuple(map(Fraction, text.split("/")))


def _stretch(text: str) -> Stretch:
    period, share, *most = text.split("/")
    return int(period), float(share), float(most[0]) if most else None


_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "H": ("period", int),
    "tau": ("overlap", int),
    "lr": ("lr", _rates),
    "mu": ("momentum", float),
    "ramp": ("ramp", float),
    "merge": ("merge", str),
    "weight": ("weight", str),
    "divisor": ("divisor", str),
    "against": ("against", int),
    "limit": ("limit", float),
    "rise": ("rise", float),
    "codec": ("codec", str),
    "feedback": ("feedback", str),
    "speeds": ("speeds", _speeds),
    "early": ("early", _stretch),
    "late": ("late", _stretch),
    "spread": ("spread", int),
    "cap": ("cap", float),
    "muend": ("momentum_end", float),
    "lrend": ("lr_end", float),
    "rate": ("rate", float),
    "moments": ("moments", str),
}


@dataclass(slots=True)
class Pending:
    """Offers of one fragment that are captured and not merged yet, [S, racks in it, N] per leaf of
    the fragment. `own`: what of it is a rack's again when it is merged; `sent`: what the others
    decode; `owed`: the residual from then on, if there is one."""

    fragment: int
    apply_at: int
    racks: list[int]
    steps: list[int]
    own: list[Tensor]
    sent: list[Tensor]
    owed: list[Tensor]
    side: int = 0
    factors: list[Tensor] = field(default_factory=list)
    """Factors of powersgd, on side `side`."""
    lacking: list[list[Tensor]] = field(default_factory=list)
    """Mean of the moments less those of each rack when they were captured, by leaf and moment."""
    captured_at: int = 0


class Outer:
    """The outer side of one arm. `thetas`: views [S, R, N] of its racks' weights, per leaf.
    `fragments[p]`: the leaves of fragment p. `slots`: the weights in each leaf. Steps count from 1
    where the racks begin to part. `moments`: those of the inner optimizer that the arm averages."""

    def __init__(
        self,
        arm: Arm,
        thetas: Sequence[Tensor],
        fragments: Sequence[Sequence[int]],
        slots: Sequence[Sequence[Slot]] = (),
        course: Course = Course(),
        moments: Moments = lambda leaf: (),
    ) -> None:
        assert arm.exchanges, f"{arm.kind} exchanges nothing"
        self.arm, self._thetas, self._fragments, self._slots = arm, thetas, fragments, slots
        self._racks, self._course, self._moments = thetas[0].shape[1], course, moments
        self._stages = arm.stages(course.length, self._racks)
        self.anchors = [theta[:, 0].clone() for theta in thetas]
        self.momenta = [torch.zeros_like(each) for each in self.anchors] if arm.momentum else []
        owes = arm.codec != "none" and arm.feedback == "buffer"
        self.residuals = [torch.zeros_like(theta) for theta in thetas] if owes else []
        self.low_rank: list[LowRank] = []
        if rank := rank_of(arm.codec):
            within = [[slot.shape for leaf in each for slot in slots[leaf]] for each in fragments]
            self.low_rank = [LowRank(rank, each, thetas[0].shape[0]) for each in within]
        self.rounds = [Fraction(0)] * len(fragments)
        self._pending: list[Pending] = []
        self._marks = [[0] * self._racks for _ in fragments]  # own steps at the last capture

    def after(self, step: int) -> None:
        """Apply what is due, then capture what is due: the order of mend's reference."""
        for pending in [each for each in self._pending if each.apply_at == step]:
            self._merge(pending)
        for fragment in range(len(self._fragments)):
            for racks in self._captured(fragment, step):
                pending = self._capture(fragment, step, racks)
                if pending.apply_at == step:
                    self._merge(pending)

    def close(self, step: int) -> None:
        """mend's closing round: what is under way is merged, then the mean of all that was
        trained since. After it all racks hold the anchors, but for what a codec has left out. With
        feedback in the weights these offers go without a codec, and have a step at least."""
        for pending in sorted(self._pending, key=lambda each: each.apply_at):
            self._merge(pending)
        for fragment in range(len(self._fragments)):
            racks, marks = range(self._racks), self._marks[fragment]
            if self.arm.feedback == "weights":
                marks[:] = [min(marks[rack], self.arm.trained(rack, step) - 1) for rack in racks]
            since = [rack for rack in racks if self.arm.trained(rack, step) > marks[rack]]
            if since:
                self._merge(self._capture(fragment, step, since, closing=True), plain=True)

    def _captured(self, fragment: int, step: int) -> list[list[int]]:
        """The racks of each round of this fragment that opens now."""
        stage = self._stage(step)
        period, everyone, step = stage.period, list(range(self._racks)), step - stage.begin
        parts = len(self._fragments)
        first = (fragment + 1) * period // parts if self.arm.spread else period  # 0: due at H
        if self.arm.kind == "turns":
            begun = [step - first - rack * period // self._racks for rack in everyone]
            return [[rack] for rack in everyone if begun[rack] >= 0 and begun[rack] % period == 0]
        if step < max(first, 1) or (step - first) % period:
            return []
        if any(each.fragment == fragment for each in self._pending):
            return []  # the stage before had a longer tau
        late = self.arm.kind == "straggler" and (step - first) // period % EVERY != EVERY - 1
        return [everyone[:-1] if late else everyone]

    def _stage(self, step: int) -> Stage:
        return next((each for each in reversed(self._stages) if step > each.begin), self._stages[0])

    def _capture(
        self, fragment: int, step: int, racks: list[int], closing: bool = False
    ) -> Pending:
        own = [
            self.anchors[leaf][:, None] - self._thetas[leaf][:, racks]
            for leaf in self._fragments[fragment]
        ]
        marks = self._marks[fragment]
        made = [self.arm.trained(rack, step) for rack in racks]
        steps = [each - marks[rack] for rack, each in zip(racks, made, strict=True)]
        for rack, each in zip(racks, made, strict=True):
            marks[rack] = each
        most = self._stage(step).overlap
        overlap = round(most * _risen(self.rounds[fragment], self.arm.rise))
        pending = Pending(
            fragment, step + overlap, racks, steps, *self._offered(fragment, racks, own, closing)
        )
        if not closing:
            pending.lacking = self._lacking(fragment, racks)
        pending.captured_at = step
        self._pending.append(pending)
        return pending

    def _lacking(self, fragment: int, racks: list[int]) -> list[list[Tensor]]:
        chosen = [self._moments(leaf) for leaf in self._fragments[fragment]]
        return [
            [each[:, racks].mean(1, keepdim=True) - each[:, racks] for _, each in moments]
            for moments in chosen
        ]

    def _offered(
        self, fragment: int, racks: list[int], own: list[Tensor], closing: bool
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], int, list[Tensor]]:
        """(own, sent, owed, side, factors) of a Pending: mend encodes a fragment of a rack as one
        vector."""
        if self.arm.codec == "none" or (closing and self.arm.feedback == "weights"):
            return own, own, [], 0, []
        leaves, x = self._fragments[fragment], own
        if self.residuals:
            x = [o + self.residuals[leaf][:, racks] for leaf, o in zip(leaves, own, strict=True)]
        if self.low_rank:
            low_rank = self.low_rank[fragment]
            side, (whole, factors) = low_rank.version % 2, low_rank.sent(torch.cat(x, -1))
        else:
            side, whole, factors = 0, sent(torch.cat(x, -1), self.arm.codec), []
        y = list(whole.split([each.shape[-1] for each in x], -1))
        owed = [a - b for a, b in zip(x, y, strict=True)] if self.residuals else []
        return (y if self.arm.feedback == "weights" else own), y, owed, side, factors

    def _along(self, leaves: Sequence[int], deltas: Sequence[Tensor]) -> Sequence[Tensor]:
        """Per leaf 1, and 0 where the row points against the momentum, if the arm looks."""
        if not self.arm.against:
            return [delta.new_ones(()) for delta in deltas]
        delta_SN = torch.cat(list(deltas), dim=1)
        momentum_SN = torch.cat([self.momenta[leaf] for leaf in leaves], dim=1)
        row = min(self.arm.against, delta_SN.shape[1])
        short = -delta_SN.shape[1] % row
        delta_SRk, momentum_SRk = (
            torch.nn.functional.pad(each.double(), (0, short)).unflatten(1, (-1, row))
            for each in (delta_SN, momentum_SN)
        )
        lengths_SR = delta_SRk.norm(dim=2) * momentum_SRk.norm(dim=2)
        product_SR = (delta_SRk * momentum_SRk).sum(2)
        along_SR = (product_SR >= self.arm.limit * lengths_SR).float()
        along_SN = along_SR.repeat_interleave(row, dim=1)[:, : delta_SN.shape[1]]
        return along_SN.split([delta.shape[1] for delta in deltas], dim=1)

    @torch.no_grad()
    def _merge(self, pending: Pending, plain: bool = False) -> None:
        """b <- (1 - s (1 - mu)) b + s D;  A' = A - lr s (D + mu b), with s = 1 unless racks are
        missing and the divisor counts them; theta <- theta + (A' - A) + own of those named. The
        momentum's part has s, too: 1 / s such rounds are one round of all. `plain`: A' = A - s
        D."""
        self._pending.remove(pending)
        fragment, shares = pending.fragment, self.arm.shares(pending.steps)
        part, damped = self._part(pending)
        cooled, most = self._course.cooled(pending.apply_at), self._stage(pending.apply_at).momentum
        lr, mu = (1.0, 0.0) if plain else self.arm.outer(self.rounds[fragment], cooled, most)
        self.rounds[fragment] += part
        leaves = self._fragments[fragment]
        deltas = [
            (self._merged(leaf, offer, shares) * float(part)).float()
            for leaf, offer in zip(leaves, pending.sent, strict=True)
        ]
        kept = self._along(leaves, deltas) if self.momenta and not plain else []
        for place, (leaf, own) in enumerate(zip(leaves, pending.own, strict=True)):
            step = delta = deltas[place]
            if kept:
                self.momenta[leaf].mul_(1 - float(part) * (1 - mu)).add_(delta)
                step = delta + self.momenta[leaf] * kept[place] * (mu * float(part) * damped)
            old, theta = self.anchors[leaf], self._thetas[leaf]
            self.anchors[leaf] = old - step * lr
            theta += (self.anchors[leaf] - old)[:, None]
            theta[:, pending.racks] += own
        for leaf, lacking in zip(leaves if pending.lacking else (), pending.lacking, strict=True):
            for (decay, each), missing in zip(self._moments(leaf), lacking, strict=True):
                each[:, pending.racks] += missing * decay ** (
                    pending.apply_at - pending.captured_at
                )
        if pending.factors:
            self.low_rank[fragment].advance(pending.side, pending.factors, shares)
        if pending.owed:
            for leaf, owed in zip(self._fragments[fragment], pending.owed, strict=True):
                self.residuals[leaf][:, pending.racks] = owed

    def _part(self, pending: Pending) -> tuple[Fraction, float]:
        """(s, by what else the momentum's step is shortened)."""
        if self.arm.divisor == "live":
            return Fraction(len(pending.racks), self._racks), 1.0
        squares = sum(each**2 for each in pending.steps)
        even = Fraction(sum(pending.steps) ** 2, len(pending.steps) * squares)
        if self.arm.divisor == "even":
            return even, 1.0
        return Fraction(1), float(even) if self.arm.divisor == "damped" else 1.0

    def _merged(self, leaf: int, offer_SRN: Tensor, shares: Sequence[float]) -> Tensor:
        """[S, N] in fp64."""
        if self.arm.merge == "mean":
            return _mean(offer_SRN, offer_SRN.new_tensor(shares, dtype=torch.float64))
        parts = offer_SRN.split([slot.numel for slot in self._slots[leaf]], dim=-1)
        plain = offer_SRN.new_tensor(shares, dtype=torch.float64)
        return torch.cat(
            [
                _mean(each, plain if slot.name in EMBEDDINGS else radial(each, plain))
                for each, slot in zip(parts, self._slots[leaf], strict=True)
            ],
            -1,
        )

    def state(self) -> dict[str, Any]:
        """Return all that a resumed run needs beside the weights."""
        names = [field.name for field in fields(Pending)]
        pending = [tuple(getattr(each, name) for name in names) for each in self._pending]
        return {
            "anchors": self.anchors, "momenta": self.momenta, "rounds": self.rounds,
            "marks": self._marks, "pending": pending, "residuals": self.residuals,
            "bases": [(each.version, each.bases) for each in self.low_rank],
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.anchors, self.momenta = state["anchors"], state["momenta"]
        self.rounds, self._marks = state["rounds"], state["marks"]
        self.residuals = state["residuals"]
        self._pending = [Pending(*each) for each in state["pending"]]
        for each, (version, bases) in zip(self.low_rank, state["bases"], strict=True):
            each.version, each.bases = version, bases


def _mean(offer_SRN: Tensor, factor: Tensor) -> Tensor:
    """sum f v in rack order, fp64 [S, N]; `factor`: [R] or [S, R]."""
    total = torch.zeros_like(offer_SRN[:, 0], dtype=torch.float64)
    for rack in range(offer_SRN.shape[1]):
        total += offer_SRN[:, rack].double() * factor[..., rack, None]
    return total


def radial(offer_SRN: Tensor, share_R: Tensor) -> Tensor:
    """[S, R], float32 numbers: f of sum f v = (sum w |v|) phi(sum w phi(v)), phi(x) = x / |x|. The
    plain mean for one offer, and where the directions cancel out; nothing of one shorter than
    1e-12."""
    if offer_SRN.shape[1] == 1:
        return share_R
    wide = offer_SRN.double()
    gram_SRR = wide @ wide.mT
    length_SR = gram_SRR.diagonal(dim1=1, dim2=2).sqrt()
    pointing = length_SR > 1e-12
    turned = torch.where(pointing, share_R / length_SR, 0.0)
    direction_S1 = (
        torch.einsum("sr,srt,st->s", turned, gram_SRR, turned).clamp(min=0).sqrt()[:, None]
    )
    found = (length_SR * share_R).sum(1, keepdim=True) * turned / direction_S1
    return torch.where(direction_S1 < 1e-6, share_R, found).float().double()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Inner: linear warm-up over a tenth, then cosine to a tenth. `step` counts from 1."""
    warm = max(1, steps // 10)
    if step <= warm:
        return peak * step / warm
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))
