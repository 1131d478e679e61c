"""The identities the update rules must keep, and the mistakes they exist to catch.

A small loop of our own over mend's parts, in which each mistake can be switched on. Every rack has
its own data: with equal data a doubled delta looks almost healthy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mend.codec import codec_named
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.fragment import realign
from mend.merge import Average
from mend.outer import Nesterov
from mend.types import Owned, Span
from mend_lab.reference import Rack, Settings, lockstep
from mend_lab.sim.vector_ledger import VectorLedger
from tests.numerics.racks import FRAGMENTS, flat, rack

PERIOD, STEPS = 5, 60
CLOSED = 2e-6  # fp32 rounding of 60 steps, relative to all movement


@dataclass(frozen=True)
class Case:
    racks: int = 2
    overlap: int = 2
    apply_mode: str = "carry"
    codec: str = "float32"
    lr: float = 1.0
    momentum: float = 0.0
    exclude_pct: int = 0
    trap: bool = False  # the merged delta is added to parameters that moved, the base is theta
    excluded_as_named: bool = False
    residual: str = "two-phase"  # or "at send" (released before the commit is known), "never"
    in_weights: bool = False  # what the codec leaves out stays in theta
    left_out_lost: bool = False  # all of the delta is taken out of theta all the same


class LedgeredRack:
    def __init__(self, number: int, case: Case, numerics: Numerics) -> None:
        self.case, self.numerics, self.rack = case, numerics, rack(number)
        self.A, self.e = flat(self.rack).clone(), None
        self.ledger = VectorLedger(self.A.numel())
        self.offer: tuple[Tensor, Tensor | None] | None = None

    def train(self, step: int) -> None:
        before = flat(self.rack)
        self.rack.train(step)
        self.ledger.moved(before, flat(self.rack))

    def put(self, theta: Tensor) -> None:
        with torch.no_grad():
            parts = theta.split([p.numel() for p in self.rack.parameters])
            for p, part in zip(self.rack.parameters, parts, strict=True):
                p.copy_(part.view(p.shape))

    def capture(self, anchor: Anchor) -> Tensor:
        """The payload. Makes a new offer each round; the one before was named or is forgotten."""
        self.ledger.dropped()
        delta, codec = self.A - flat(self.rack), anchor.codec
        encoded = self.numerics.encode(delta, self.e, None, codec)
        y = codec.decode(encoded.payload, 0, delta.numel(), torch.empty_like(delta))
        self.ledger.captured(y)
        taken = delta if encoded.sent is None or self.case.left_out_lost else encoded.sent
        self.offer = (taken, encoded.pend)
        if self.case.residual == "at send":
            self.e = encoded.pend
        return encoded.payload

    def apply(self, old: Tensor, new: Tensor, named: bool) -> None:
        assert self.offer is not None
        (delta, pend), theta = self.offer, flat(self.rack)
        if named:
            self.ledger.named()
            if self.case.residual == "two-phase":
                self.e = pend
        if self.case.trap:
            self.put(theta - (old - new))
            self.A = flat(self.rack).clone()
            return
        used = delta if named or self.case.excluded_as_named else None
        out = torch.empty_like(theta)
        realign(theta, self.A, used, new, self.case.apply_mode, 0.5, out)
        self.put(out)
        self.A = new.clone()

    @property
    def gap(self) -> float:
        return self.ledger.error(flat(self.rack), self.A, self.e)


def owned(rack: Rack) -> Owned:
    """All of its parameters, one after the other."""
    spans = tuple(Span(0, p.numel()) for p in rack.parameters)
    shapes = tuple(tuple(p.shape) for p in rack.parameters)
    return Owned(spans, sum(span.numel for span in spans), shapes)


def run(case: Case) -> list[LedgeredRack]:
    outer = Nesterov(case.lr, case.momentum)
    numerics = Numerics(codec_named(case.codec), Average(), outer, in_weights=case.in_weights)
    racks = [LedgeredRack(n, case, numerics) for n in range(case.racks)]
    chance = torch.Generator().manual_seed(7)
    anchor = after = numerics.genesis(racks[0].A, owned(racks[0].rack))
    named: list[int] = []
    for step in range(1, STEPS + 1):
        for each in racks:
            each.train(step)
        if step % PERIOD == 0:
            payloads = [each.capture(anchor) for each in racks]
            lots = torch.randint(0, 100, (case.racks,), generator=chance).tolist()
            named = [n for n, lot in enumerate(lots) if lot >= case.exclude_pct] or [0]
            weights = [float(torch.tensor(1 / len(named)))] * len(named)
            after = numerics.merge(
                [payloads[n] for n in named], weights, anchor, anchor.version + 1
            )
        if step > case.overlap and (step - case.overlap) % PERIOD == 0:
            for n, each in enumerate(racks):
                each.apply(anchor.values, after.values, n in named)
            anchor = after
    return racks


def worst(case: Case) -> float:
    return max(each.gap for each in run(case))


CARRY = {
    "plain": Case(),
    "no overlap": Case(overlap=0),
    "long overlap": Case(overlap=4),
    "outer momentum": Case(lr=0.7, momentum=0.6),
    "three racks": Case(racks=3),
    "excluded": Case(exclude_pct=30),
    "three racks, excluded, momentum": Case(racks=3, exclude_pct=30, lr=0.7, momentum=0.3),
    "bfloat16": Case(codec="bfloat16"),
    "bfloat16, excluded": Case(racks=3, codec="bfloat16", exclude_pct=30),
    **{
        f"{codec}, {overlap} late, 30 % excluded": Case(
            racks=3, codec=codec, overlap=overlap, exclude_pct=30
        )
        for codec in ("int8", "int4", "e3m0", "topk", "powersgd-2", "sparse")
        for overlap in (0, 4)
    },
    **{
        f"{codec} in the weights, {overlap} late, {pct} % excluded": Case(
            racks=3, codec=codec, overlap=overlap, exclude_pct=pct, in_weights=True
        )
        for codec in ("topk", "powersgd-2")
        for overlap in (0, 4)
        for pct in (0, 30)
    },
}


@pytest.mark.parametrize("name", CARRY, ids=lambda name: name.replace(" ", "_"))
def test_carry_loses_nothing_and_doubles_nothing(name: str) -> None:
    assert worst(CARRY[name]) < CLOSED


MISTAKES = {
    "the merged delta added to parameters that moved": Case(trap=True),
    "the same with exclusions": Case(racks=3, trap=True, exclude_pct=30),
    "an excluded offer treated as named": Case(racks=3, exclude_pct=30, excluded_as_named=True),
    "overwrite forgets the overlap": Case(apply_mode="overwrite"),
    "blend forgets a part of it": Case(apply_mode="blend"),
}


@pytest.mark.parametrize("name", MISTAKES, ids=lambda name: name.replace(" ", "_"))
def test_a_wrong_rule_leaves_the_ledger_open(name: str) -> None:
    assert worst(MISTAKES[name]) > 0.01


BFLOAT16 = Case(racks=3, codec="bfloat16", exclude_pct=30)


@pytest.mark.parametrize("release", ["at send", "never"])
def test_a_residual_released_at_the_wrong_moment_leaves_the_ledger_open(release: str) -> None:
    """bfloat16 drops little, so the gap is small: far above fp32 rounding all the same."""
    closed, opened = worst(BFLOAT16), worst(replace(BFLOAT16, residual=release))
    assert opened > 1e-4
    assert opened > 30 * closed


@pytest.mark.parametrize(("codec", "gap"), [("int4", 0.01), ("topk", 0.1), ("powersgd-2", 0.1)])
def test_one_phase_feedback_loses_what_an_excluded_offer_held(codec: str, gap: float) -> None:
    """Open implementations release the residual when they send. Of an offer that no commit names
    the part that was sent is carried, and the residual counts it once more or never."""
    case = Case(racks=3, codec=codec, exclude_pct=30)
    assert worst(case) < CLOSED
    assert worst(replace(case, residual="at send")) > gap
    never = worst(replace(case, residual="never"))
    assert never > gap


@pytest.mark.parametrize("codec", ["topk", "powersgd-2"])
def test_feedback_in_the_weights_keeps_what_was_left_out_and_needs_no_residual(codec: str) -> None:
    case = Case(racks=3, codec=codec, exclude_pct=30, in_weights=True)
    machines = run(case)
    assert max(machine.gap for machine in machines) < CLOSED
    assert all(machine.e is None for machine in machines)
    assert worst(replace(case, left_out_lost=True)) > 0.1


def test_more_overlap_is_more_lost_to_overwrite() -> None:
    gaps = [worst(Case(racks=1, apply_mode="overwrite", overlap=overlap)) for overlap in (0, 2, 4)]
    assert gaps[0] < CLOSED < gaps[1] < gaps[2]


# ------------------------------------------------------------- one rack: the outer loop is
# invisible


def alone(steps: int) -> Tensor:
    me = rack(3)
    for step in range(1, steps + 1):
        me.train(step)
    return flat(me)


@pytest.mark.parametrize("fragments", [((0, 1, 2, 3),), FRAGMENTS], ids=["P=1", "P=3"])
@pytest.mark.parametrize("overlap", [0, 3])
def test_one_rack_with_carry_is_plain_training(
    fragments: tuple[tuple[int, ...], ...], overlap: int
) -> None:
    out = lockstep([rack(3)], Settings(fragments=fragments, period=5, overlap=overlap), STEPS)
    assert len(out.commits) >= 10 * len(fragments)
    theta = torch.cat(out.thetas[0])
    if overlap == 0:
        assert torch.equal(theta, alone(STEPS))
    else:
        assert (theta - alone(STEPS)).abs().max() < 5e-6


@pytest.mark.parametrize("apply_mode", ["overwrite", "blend"])
def test_one_rack_without_overlap_alone_is_plain_training_in_any_apply_mode(
    apply_mode: str,
) -> None:
    for overlap, is_plain in ((0, True), (3, False)):
        settings = Settings(fragments=FRAGMENTS, period=5, overlap=overlap, apply_mode=apply_mode)
        theta = torch.cat(lockstep([rack(3)], settings, STEPS).thetas[0])
        apart = (theta - alone(STEPS)).abs().max()
        assert apart < 5e-6 if is_plain else apart > 1e-3


def test_racks_with_the_same_data_stay_equal_and_are_plain_training() -> None:
    settings = Settings(fragments=FRAGMENTS, period=5, overlap=3)
    out = lockstep([rack(3), rack(3)], settings, STEPS)
    first, second = (torch.cat(theta) for theta in out.thetas)
    assert torch.equal(first, second)
    assert (first - alone(STEPS)).abs().max() < 5e-6


def test_racks_with_other_data_differ_but_their_anchor_is_one() -> None:
    out = lockstep([rack(1), rack(2)], Settings(fragments=FRAGMENTS, period=5, overlap=0), 60)
    first, second = (torch.cat(theta) for theta in out.thetas)
    assert not torch.equal(first, alone(STEPS))
    last = FRAGMENTS[-1]  # captured and applied at the last step, so both are at the anchor
    assert last
    old, new = (anchor.values for anchor in out.anchors[-1][-2:])
    for theta in (out.thetas[0][-1], out.thetas[1][-1]):
        # Carry at tau 0 ends at the anchor, but for the roundings of D, A - D and the sum. The
        # racks moved by less than three times what the anchor did.
        sizes = 2 * (old.abs() + new.abs()) + 3 * (new - old).abs()
        assert bool(((theta - new).abs() <= sizes * 2.0**-23).all())
    assert not torch.equal(first, second), "the other fragments moved on since"


def test_no_token_is_in_two_rounds() -> None:
    """Tokens of the commits plus what is still open are the tokens trained, for unequal racks and
    both marks."""
    for apply_mode in ("carry", "overwrite"):
        racks = [rack(n, tokens=lambda step, n=n: 3 + 5 * n + step % 2) for n in range(2)]
        settings = Settings(fragments=FRAGMENTS, period=5, overlap=2, apply_mode=apply_mode)
        out = lockstep(racks, settings, 60)
        for n in range(2):
            named = [m for c in out.commits if c.fragment == 2 for m in c.members if m.rack == n]
            trained = sum(3 + 5 * n + step % 2 for step in range(1, 61))
            assert sum(m.steps for m in named) == (60 if apply_mode == "carry" else 60 - 2 * 11)
            assert sum(m.tokens for m in named) <= trained
            assert (sum(m.tokens for m in named) == trained) == (apply_mode == "carry")
