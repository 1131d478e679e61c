"""The batched quality bench follows the rule of mend's one-page reference, arm by arm, and a run in
pieces is the run in one piece."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import quality_gpu, quality_gpu_codecs, quality_gpu_outer, quality_gpu_table
from benchmarks.quality_gpu import Bench, Plan
from benchmarks.quality_gpu_model import EMBEDDINGS, SIZES, Size, Texts, leaves_of, orthogonal
from benchmarks.quality_gpu_outer import Course, Outer, Pending, Stage, parse_arm
from mend.codec import CODECS
from mend.codec.powersgd import PowerSGD
from mend.tools.demo_corpus import Corpus
from mend.types import Owned, Span
from mend_lab.reference import (
    Anchor,
    Applied,
    Captured,
    Commit,
    Event,
    Facts,
    Named,
    Rack,
    Settings,
    lockstep,
    merge,
    outer_step,
    replay,
)

ROOT = Path(__file__).parent.parent.parent
SIZE = Size(16, 4, 2, 16, 2)
TOKENS = SIZE.batch * SIZE.context
PLAN = Plan(
    size="test", racks=3, seeds=2, steps=13, warm=0, learning_rate=3e-3, look=13, held_out=2,
    arms=("merge:H=4",),
)  # fmt: skip
PARTS = [[2 * part, 2 * part + 1] for part in range(SIZE.fragments)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def corpus(racks: int = 3) -> Corpus:
    found = [path.read_bytes() for path in sorted((ROOT / "src/mend/fragment").glob("*.py"))]
    assert len(found) > racks
    return Corpus(tuple(found[1 : racks + 1]), found[0])


def bench(*arms: str, **changes: Any) -> Bench:
    plan = replace(PLAN, arms=arms or PLAN.arms, **changes)
    return Bench(plan, SIZE, corpus(plan.racks), CPU)


def done(*arms: str, **changes: Any) -> Bench:
    made = bench(*arms, **changes)
    for _ in range(made.plan.steps):
        made.advance()
    return made


def theta(made: Bench, arm: int, seed: int, rack: int) -> list[Tensor]:
    """Per fragment, flat."""
    leaves = [made.view(value.detach())[arm, seed, rack] for value in made.values]
    return [torch.cat([leaves[leaf] for leaf in part]) for part in PARTS]


def single(made: Bench, seed: int, rack: int) -> Rack:
    """One rack of one seed as a model of its own, for the reference."""
    whole = corpus(made.plan.racks)
    own = Bench(
        replace(made.plan, racks=1, seeds=seed + 1, arms=("alone",)),
        SIZE, Corpus(whole.racks[:1], whole.held_out), CPU,
    )  # fmt: skip
    starts = [value.detach()[seed : seed + 1] for value in own.values]
    own.plan = replace(own.plan, seeds=1)
    own._take([value.clone() for value in starts], 1)

    def train(step: int) -> int:
        own.step = step
        own.train(made.texts.batch([seed], step)[0, rack][None])
        return TOKENS

    return Rack(tuple(own.values), train)


def settings(arm: str) -> Settings:
    said = parse_arm(arm)
    return Settings(
        fragments=PARTS if said.spread else [[leaf for part in PARTS for leaf in part]],
        period=said.period, overlap=said.overlap, outer_lr=said.lr[0],
        momentum=min(said.momentum, said.cap),
        ramp=round(said.ramp) if said.cap < 1 else 0,
        payload={"none": "float32", "bf16": "bfloat16"}.get(said.codec, said.codec),
    )  # fmt: skip


# ------------------------------------------------------------------ the reference


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm",
    [
        "merge:H=4", "merge:H=4:tau=3", "merge:H=3:tau=1:lr=.7:mu=.9", "merge:H=1",
        "merge:H=4:tau=1:codec=int8",
    ],
)  # fmt: skip
def test_a_batched_arm_is_the_reference(arm: str) -> None:
    made = done("alone", arm, "merge:H=2:lr=.5")
    for seed in range(2):
        out = lockstep([single(made, seed, rack) for rack in range(3)], settings(arm), 13)
        assert min(len(versions) for versions in out.anchors) > 3
        for rack in range(3):
            for part, ours in enumerate(theta(made, 1, seed, rack)):
                torch.testing.assert_close(ours, out.thetas[rack][part], rtol=0, atol=1e-4)
                assert float((ours - out.anchors[part][0].values).abs().max()) > 1e-2
        for part, versions in enumerate(out.anchors):
            ours = torch.cat([made.outers[1].anchors[leaf][seed] for leaf in PARTS[part]])
            applied = versions[int(made.outers[1].rounds[part])]
            torch.testing.assert_close(ours, applied.values, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["merge:H=4:tau=1:spread=0", "merge:H=2:lr=.7:mu=.9:ramp=2:cap=.6"])
def test_one_fragment_and_a_capped_ramp_are_the_reference(arm: str) -> None:
    made, now = done(arm, seeds=1), settings(arm)
    out = lockstep([single(made, 0, rack) for rack in range(3)], now, 13)
    assert len(out.anchors[0]) > (5 if now.ramp else 3), "k / (k + 2) has passed .6"
    for rack in range(3):
        ours = torch.cat(theta(made, 0, 0, rack))
        torch.testing.assert_close(ours, torch.cat(list(out.thetas[rack])), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["merge:H=4:tau=2", "merge:H=3:lr=.7:mu=.6"])
def test_the_batched_radial_mean_is_that_of_the_reference(arm: str) -> None:
    """Weight by weight; embeddings by the mean."""
    made = done(f"{arm}:merge=rda", arm, seeds=1)
    racks, slots = [], [slot for leaf in made.leaves for slot in leaf.slots]
    for rack in range(3):
        whole = single(made, 0, rack)
        views = [
            view
            for leaf, value in zip(made.leaves, whole.parameters, strict=True)
            for view in value.detach().split([slot.numel for slot in leaf.slots], dim=1)
        ]
        racks.append(Rack(views, whole.train))
    owner = [leaf.fragment for leaf in made.leaves for _ in leaf.slots]
    fragments = [[i for i, part in enumerate(owner) if part == p] for p in range(4)]
    radial = [i for i, slot in enumerate(slots) if slot.name not in EMBEDDINGS]
    assert len(slots) - len(radial) == 2
    out = lockstep(racks, replace(settings(arm), fragments=fragments, radial=radial), 13)
    for rack in range(3):
        for part, theirs in enumerate(out.thetas[rack]):
            torch.testing.assert_close(theta(made, 0, 0, rack)[part], theirs, rtol=0, atol=1e-4)
            assert float((theta(made, 1, 0, rack)[part] - theirs).abs().max()) > 1e-3


@pytest.mark.parametrize("codec", ["int8", "int4", "e3m0", "topk"])
def test_batched_codecs_are_those_of_mend(codec: str) -> None:
    chance = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, 9001, generator=chance) * torch.rand(2, 3, 9001, generator=chance) ** 8
    found, made = quality_gpu_codecs.sent(x, codec), CODECS[codec]()
    for row, ours in zip(x.flatten(0, 1), found.flatten(0, 1), strict=True):
        theirs = made.decode(made.encode(row), 0, 9001, torch.empty(9001))
        assert torch.equal(ours + 0.0, theirs + 0.0)


def test_batched_low_rank_is_that_of_mend() -> None:
    """Four versions, so that both sides come, and both from a merged factor."""
    shapes, racks = [(24, 40), (40,), (96, 17)], 3
    numels = [math.prod(shape) for shape in shapes]
    spans = tuple(Span(0, numel) for numel in numels)
    owned = Owned(spans, sum(numels), tuple(shapes))
    theirs = PowerSGD(4).of(owned, 1)
    state, after = torch.empty(theirs.state_numel), torch.empty(theirs.state_numel)
    theirs.first(state)
    ours = quality_gpu_codecs.LowRank(4, shapes, 1)
    ours.bases = [[each.mT[None] for each in theirs.bases(state, side)] for side in (0, 1)]
    chance, shares = torch.Generator().manual_seed(3), [0.5, 0.3, 0.2]
    for version in range(4):
        x_RN = torch.randn(racks, sum(numels), generator=chance)
        codec = theirs.at(state, version)
        payloads = [codec.encode(row) for row in x_RN]
        decoded = [
            codec.decode(each, 0, len(x_RN[0]), torch.empty_like(x_RN[0])) for each in payloads
        ]
        y_SRN, factors = ours.sent(x_RN[None])
        torch.testing.assert_close(y_SRN[0], torch.stack(decoded), rtol=0, atol=2e-2)
        theirs.advance(payloads, shares, state, version, after)
        ours.advance(version % 2, factors, shares)
        state, after = after, state


@pytest.mark.parametrize("feedback", ["buffer", "none", "weights"])
def test_residual_of_a_codec_is_kept_as_the_arm_says(feedback: str) -> None:
    """One rack alone, two captures of 4096 elements, of which topk sends 64: what was trained is
    merged, or owed, or in the weights; without feedback the rest is gone."""
    moved = torch.randn(1, 1, 4096, generator=torch.Generator().manual_seed(8))
    theta_SRN = torch.zeros(1, 1, 4096)
    outer = Outer(parse_arm(f"merge:H=1:codec=topk:feedback={feedback}"), [theta_SRN], [[0]])
    for step in (1, 2):
        theta_SRN -= moved
        outer.after(step)
    merged, left = -outer.anchors[0], outer.anchors[0] - theta_SRN[:, 0]
    assert int(merged.count_nonzero()) in range(64, 129)
    owed = outer.residuals[0][:, 0] if outer.residuals else torch.zeros(1, 4096)
    missing = float((merged + left + owed - 2 * moved[:, 0]).norm() / moved.norm())
    assert (missing > 1) if feedback == "none" else (missing < 1e-6)
    assert (float(left.norm()) > 1) == (feedback == "weights")


class Spied(Outer):
    """Writes down what is captured and merged."""

    now = 0
    log: list[tuple[str, int, Pending]]

    def after(self, step: int) -> None:
        self.now = step
        super().after(step)

    def _capture(
        self, fragment: int, step: int, racks: list[int], closing: bool = False
    ) -> Pending:
        pending = super()._capture(fragment, step, racks, closing)
        self.log.append(("capture", step, pending))
        return pending

    def _merge(self, pending: Pending, plain: bool = False) -> None:
        self.log.append(("merge", self.now, pending))
        super()._merge(pending, plain)


def told(log: list[tuple[str, int, Pending]], racks: int, steps: int) -> tuple[list[Facts], Any]:
    """The same run in the words of the reference; counters and versions are worked out anew."""
    events: list[list[Event]] = [[] for _ in range(racks)]
    seq = [[0] * 4 for _ in range(racks)]
    marks = [[0] * 4 for _ in range(racks)]
    versions = [0] * 4
    members: dict[int, list[Named]] = {}
    commits = []
    for what, step, pending in log:
        part = pending.fragment
        if what == "capture":
            members[id(pending)] = []
            for rack in pending.racks:
                seq[rack][part] += 1
                spent, marks[rack][part] = step - marks[rack][part], step
                events[rack].append(Captured(step, part, seq[rack][part]))
                members[id(pending)].append(
                    Named(rack, seq[rack][part], versions[part], spent * TOKENS, spent)
                )
        else:
            versions[part] += 1
            named = members[id(pending)]
            absent = [(named[0].tokens, named[0].steps)] * (racks - len(named))
            commits.append(Commit(part, versions[part], named, absent=absent))
            for each in events:
                each.append(Applied(step, part, versions[part]))
    return [Facts(steps, each) for each in events], commits


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm",
    [
        "turns:H=6:tau=1:lr=.7:mu=.6:weight=period:divisor=live",
        "turns:H=3:tau=2:lr=.4:weight=period:divisor=live",
        "straggler:H=2:tau=1:lr=.7:mu=.3:weight=period:divisor=live",
        "straggler:H=2:weight=period:divisor=live",
    ],
)
def test_partial_rounds_are_the_reference_too(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers that wait while other rounds are applied; offers that span four periods."""
    Spied.log = []
    monkeypatch.setattr(quality_gpu, "Outer", Spied)
    made = done(arm, seeds=1, steps=19)
    facts, commits = told(Spied.log, 3, 19)
    assert len({len(commit.members) for commit in commits}) == (2 if "straggler" in arm else 1)
    out = replay([single(made, 0, rack) for rack in range(3)], settings(arm), facts, commits)
    for rack in range(3):
        for ours, theirs in zip(theta(made, 0, 0, rack), out.thetas[rack], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_changing_period_is_the_reference_with_these_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H 4, 8 and 4; the last fragment's offer of step 14 comes at 19, so none at 18."""
    Spied.log = []
    monkeypatch.setattr(quality_gpu, "Outer", Spied)
    arm = "merge:H=8:tau=5:early=4/.3:late=4/.3"
    made = done(arm, seeds=1, steps=20)
    for fragment, expected in ((0, [1, 5, 8, 15, 19]), (3, [4, 14])):
        found = [(step, each) for what, step, each in Spied.log if what == "capture"]
        steps = [step for step, each in found if each.fragment == fragment]
        assert steps == expected
    facts, commits = told(Spied.log, 3, 20)
    out = replay([single(made, 0, rack) for rack in range(3)], settings(arm), facts, commits)
    for rack in range(3):
        for ours, theirs in zip(theta(made, 0, 0, rack), out.thetas[rack], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_slow_rack_makes_its_share_of_the_steps_and_counts_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of the speed: steps 1, 4, 7, 10, 13. Of its model nothing moves in the others."""
    Spied.log = []
    monkeypatch.setattr(quality_gpu, "Outer", Spied)
    arms = ("alone:speeds=1/1/0.34", "merge:H=4:speeds=1/0.5/0.25", "merge:H=4")
    made = bench(*arms)
    plain = bench("merge:H=4:speeds=1", "merge:H=4")
    moved = list[int]()
    for step in range(1, 14):
        before = [made.view(value.detach())[0, :, 2].clone() for value in made.values]
        made.advance()
        plain.advance()
        after = [made.view(value.detach())[0, :, 2] for value in made.values]
        moments = [made.optimizer.state[value]["exp_avg"] for value in made.values]
        kept = [made.view(moment)[0, :, 2] for moment in moments]
        if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            moved.append(step)
        elif step == 2:
            held = [each.clone() for each in kept]
        elif step == 3:
            assert all(torch.equal(a, b) for a, b in zip(held, kept, strict=True))
    assert moved == [1, 3, 6, 9, 12]
    assert all(torch.equal(plain.view(value)[0], plain.view(value)[1]) for value in plain.values)
    offers = [pending for what, _, pending in Spied.log if what == "capture"]
    weights = [each.steps for each in offers if each.fragment == 3]
    assert [4, 2, 1] in weights
    assert [4, 4, 4] in weights


@pytest.mark.parametrize("arm", ["merge:H=4:tau=1", "merge:H=4:codec=topk:feedback=weights"])
def test_behind_the_closing_round_every_rack_holds_the_anchor(arm: str) -> None:
    """It is the mean of what they held."""
    made = done("alone", arm, "merge:H=4:mu=.9")
    mean, closed = made.curve[-1][1], made.close()
    for part in range(4):
        anchor = torch.cat([made.outers[1].anchors[leaf] for leaf in PARTS[part]], -1)
        for seed, rack in ((0, 0), (1, 2)):
            torch.testing.assert_close(theta(made, 1, seed, rack)[part], anchor[seed])
    assert closed[0] == pytest.approx(mean[0])
    assert closed[1] == pytest.approx(mean[1], abs=1e-5)
    assert closed[2] == pytest.approx(mean[2], abs=1e-5)


def test_a_ramp_counts_the_rounds_before() -> None:
    arm = parse_arm("merge:H=4:lr=1-.7:mu=.9:ramp=3")
    assert arm.outer(Fraction(0)) == (1.0, 0.0)
    assert arm.outer(Fraction(3)) == pytest.approx((1 - 0.3 * 5 / 9, 0.5))
    assert arm.outer(Fraction(27)) == pytest.approx((0.7, 0.9))
    assert arm.outer(Fraction(1000)) == pytest.approx((0.7, 0.9))
    assert parse_arm("merge:lr=.7:mu=.9").outer(Fraction(0)) == (0.7, 0.9)


def test_outer_rates_fall_with_the_inner_one() -> None:
    arm = parse_arm("merge:mu=.9:ramp=10:cap=.8:muend=.5:lrend=.7")
    assert arm.outer(Fraction(5)) == pytest.approx((1.0, 5 / 15))
    assert arm.outer(Fraction(1000)) == pytest.approx((1.0, 0.8))
    assert arm.outer(Fraction(1000), 0.5) == pytest.approx((0.85, 0.65))
    assert arm.outer(Fraction(1000), 1.0, 0.25) == pytest.approx((0.7, 0.25))
    course = Course(100, 40)
    assert [course.cooled(step) for step in (60, 70)] == pytest.approx([1, 1])
    assert course.cooled(15) == pytest.approx(0.5)  # halfway between steps 10 and 100
    assert Course(100, 0).cooled(9) == 0


def test_parts_with_an_own_period_have_its_momentum_and_overlap() -> None:
    stages = parse_arm("merge:H=32:tau=8:mu=.9:early=16/.25/.3:late=8/.05").stages(400, 4)
    assert stages == [Stage(0, 16, 4, 0.3), Stage(100, 32, 8), Stage(380, 8, 2, 0.5)]


def test_merged_moments_are_those_of_a_mean_at_the_capture() -> None:
    """Two racks with moments 1 and 3, which fall by half each step; the merge is two steps late."""
    theta_SRN, moment_SRN = torch.zeros(1, 2, 1), torch.tensor([[[1.0], [3.0]]])
    outer = Outer(
        parse_arm("merge:H=3:tau=2:moments=m"), [theta_SRN], [[0]],
        moments=lambda leaf: [(0.5, moment_SRN)],
    )  # fmt: skip
    for step in range(1, 6):
        outer.after(step)
        if step == 4:
            assert moment_SRN.flatten().tolist() == [0.5, 1.5]
        if step in (3, 4):
            moment_SRN *= 0.5
    assert moment_SRN.flatten().tolist() == [0.5, 0.5]


def test_averaged_moments_change_a_run_and_a_rate_is_that_of_the_whole_bench() -> None:
    made = done(
        "merge:H=4", "merge:H=4:moments=m", "merge:H=4:moments=mv", "alone:rate=.5", seeds=1
    )
    losses = [rows[0] for rows in made.curve[-1][1]]
    assert len({round(loss, 5) for loss in losses[:3]}) == 3
    firsts, seconds = (
        [made.view(made.optimizer.state[value][key])[2, 0] for value in made.values]
        for key in ("exp_avg", "exp_avg_sq")
    )
    assert torch.equal(firsts[6][0], firsts[6][1]) is False  # merged at 4, 8 and 12, trained since
    assert all(bool((each >= 0).all()) for each in seconds)
    slow = done("alone", seeds=1, learning_rate=1.5e-3)
    for ours, theirs in zip(theta(made, 3, 0, 1), theta(slow, 0, 0, 1), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_mean_at_the_end_is_of_the_closed_model_and_the_last_anchors() -> None:
    made = bench("dp", "merge:H=4:mu=.5", average=(1, 3), spacing=4)
    kept: dict[int, list[list[Tensor]]] = {}
    while made.step < 13:
        made.advance()
        parallel = [made.view(value.detach())[0, :, 0].clone() for value in made.values]
        kept[made.step] = [parallel, [each.clone() for each in made.outers[1].anchors]]
    closed, found = made.close(), made.averaged()
    for arm in range(2):
        assert found[1][arm] == pytest.approx(closed[arm], abs=1e-5)
        last = kept[13][0] if arm == 0 else made.outers[1].anchors
        mean = [sum(leaf) / 3 for leaf in zip(kept[5][arm], kept[9][arm], last, strict=True)]
        assert found[3][arm] == pytest.approx(made._held_out(mean).tolist(), abs=1e-5)
        assert found[3][arm] != pytest.approx(closed[arm], abs=1e-5)


def test_a_ramp_is_the_outer_step_of_the_reference_with_other_settings_each_round() -> None:
    arm, made = "merge:H=4:lr=1-.7:mu=.9:ramp=3", done("merge:H=4:lr=1-.7:mu=.9:ramp=3", seeds=1)
    racks = [single(made, 0, rack) for rack in range(3)]

    def read(rack: Rack, part: int) -> Tensor:
        return torch.cat([rack.parameters[leaf].detach().flatten() for leaf in PARTS[part]])

    anchors = [Anchor(0, v, torch.zeros_like(v)) for v in (read(racks[0], p) for p in range(4))]
    for step in range(1, 14):
        for rack in racks:
            rack.train(step)
        for part in range(4):
            if not settings(arm).due(part, step):
                continue
            old = anchors[part]
            lr, mu = parse_arm(arm).outer(Fraction(old.version))
            delta = merge([old.values - read(rack, part) for rack in racks], [1 / 3] * 3)
            now = replace(settings(arm), outer_lr=lr, momentum=mu)
            anchors[part] = outer_step(old, delta, now)
            for rack in racks:
                sizes = [rack.parameters[leaf].numel() for leaf in PARTS[part]]
                for leaf, value in zip(PARTS[part], anchors[part].values.split(sizes), strict=True):
                    rack.parameters[leaf].detach().copy_(value[None])
    assert [anchor.version for anchor in anchors] == [4, 3, 3, 3]
    for part in range(4):
        torch.testing.assert_close(theta(made, 0, 0, 2)[part], read(racks[2], part), rtol=0,
                                   atol=1e-4)  # fmt: skip


def test_missing_racks_shrink_the_step_and_the_forgetting() -> None:
    """Two racks in turns, divided by both: half a delta, half a round, by hand."""
    theta_SRN = torch.tensor([[[1.0], [1.0]]])
    outer = Outer(parse_arm("turns:H=2:lr=1:mu=.5:divisor=live"), [theta_SRN], [[0]])
    theta_SRN[0, 0] -= 0.5
    outer.after(1)  # nobody is due: the only fragment is due at H
    outer.after(2)  # rack 0: s D = .25, b = .25, step .25 + .5 * .5 * .25
    assert outer.anchors[0].item() == pytest.approx(0.6875)
    assert theta_SRN.flatten().tolist() == pytest.approx([0.6875, 0.6875])
    theta_SRN[0, 1] -= 0.1
    outer.after(3)  # rack 1: s D = .05, b = .75 * .25 + .05 = .2375, step .05 + .25 * .2375
    assert outer.anchors[0].item() == pytest.approx(0.6875 - 0.109375)
    assert theta_SRN.flatten().tolist() == pytest.approx([0.578125, 0.578125])
    assert outer.rounds == [Fraction(1)]


@pytest.mark.parametrize(
    ("row", "first", "second"), [(0, 0.425, -0.025), (1, 0.45, -0.025), (8, 0.45, 0.15)]
)
def test_row_merged_delta_points_against_momentum_takes_the_step_of_the_mean(
    row: int, first: float, second: float
) -> None:
    """Two leaves of one fragment move by .5; then the first goes back by .2, the other on by .1."""
    theta_SRN = [torch.ones(1, 2, 1), torch.ones(1, 2, 1)]
    outer = Outer(parse_arm(f"merge:H=2:mu=.5:against={row}"), theta_SRN, [[0, 1]])
    for each in theta_SRN:
        each -= 0.5
    outer.after(2)  # b = .5, step .5 + .25
    assert [each.item() for each in outer.anchors] == [0.25, 0.25]
    theta_SRN[0] += 0.2
    theta_SRN[1] -= 0.1
    outer.after(4)  # b = .05 and .35, steps -.2 + .025 and .1 + .175, or without the momentum's
    assert [each.item() for each in outer.anchors] == pytest.approx([first, second])


@pytest.mark.parametrize(
    ("words", "moved", "later"),
    [
        ("weight=tokens", 0.68, 0.34),
        ("weight=alike", 0.5, 0.25),
        ("weight=nova", 0.68, 0.34),
        ("divisor=damped", 0.68, 0.34 * 25 / 34),
        ("weight=nova:divisor=damped", 0.68, 0.34 * 25 / 34),
        ("divisor=even", 0.68 * 25 / 34, 0.34 * (25 / 34) ** 2),
    ],
)
def test_racks_of_unequal_speed_count_as_the_arm_says(
    words: str, moved: float, later: float
) -> None:
    """Four steps of .2 and one of .2, by hand: the step, and what half of the momentum adds."""
    theta_SRN = torch.tensor([[[1.0], [1.0]]])
    outer = Outer(parse_arm(f"merge:H=4:mu=.5:speeds=1/.25:{words}"), [theta_SRN], [[0]])
    theta_SRN[0, 0] -= 0.8
    theta_SRN[0, 1] -= 0.2
    outer.after(4)
    assert outer.anchors[0].item() == pytest.approx(1 - moved - later)


# ------------------------------------------------------------------ the bench


def test_data_parallel_is_one_model_on_the_text_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW divides a gradient by its size: of one that is nearly 0 the rounding, which depends on
    the processor, became a tenth of a step. A large epsilon leaves roundings as small as they
    are."""
    monkeypatch.setattr(quality_gpu, "EPS", 1e-2)
    made = done("dp", "alone", seeds=1)
    one = bench("alone", seeds=1, racks=1)
    for step in range(1, 14):
        one.step = step
        batch = made.texts.batch([0], step)[0].flatten(0, 1)
        one.train(batch[None])
    for rack in range(3):
        for ours, theirs in zip(theta(made, 0, 0, rack), theta(one, 0, 0, 0), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert not torch.allclose(theta(made, 1, 0, 0)[0], theta(made, 1, 0, 1)[0], atol=1e-3)


def test_an_arm_does_not_see_the_others() -> None:
    few, many = done("merge:H=4"), done("dp", "merge:H=4", "merge:H=2:lr=.7:mu=.9")
    assert few.curve[-1][1][0] == pytest.approx(many.curve[-1][1][1], abs=1e-5)
    assert few.curve[-1][1][0] != pytest.approx(many.curve[-1][1][2], abs=1e-4)


def test_a_warm_start_is_data_parallel_for_all() -> None:
    """Up to the end of the warm start, and then each as a run that begins there."""
    made = bench("dp", "merge:H=4:tau=1", warm=5)
    for _ in range(5):
        made.advance()
    assert made.wide == 2
    rest = bench("dp", seeds=2)
    for _ in range(5):
        rest.advance()
    for arm in range(2):
        for rack in range(3):
            for ours, theirs in zip(theta(made, arm, 1, rack), theta(rest, 0, 1, 0), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    while made.step < 13:
        made.advance()
        rest.advance()
    for ours, theirs in zip(theta(made, 0, 1, 0), theta(rest, 0, 1, 0), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert made.outers[1].rounds == [2, 2, 2, 1], "applied at 2, 6; 3, 7; 4, 8; 5 behind it"


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "inner"), [(3, "muon"), (5, "adamw"), (8, "muon")])
def test_a_run_in_pieces_is_the_run_in_one(cut: int, inner: str, tmp_path: Path) -> None:
    arms = (
        "dp",
        "turns:H=4:tau=2:mu=.9:ramp=2:divisor=live",
        "merge:H=4:tau=2:rise=2",
        "merge:H=4:tau=2:codec=int4:moments=mv:rate=2",
    )
    whole = done(*arms, warm=5, look=4, steps=12, inner=inner, average=(2,), spacing=2)
    first, second = (
        bench(*arms, warm=5, look=4, steps=12, inner=inner, average=(2,), spacing=2)
        for _ in range(2)
    )
    while first.step < cut:
        first.advance()
    first.save(tmp_path / "part")
    second.load(tmp_path / "part")
    assert second.step == cut
    while second.step < 12:
        second.advance()
    assert second.curve == whole.curve
    whole.close(), second.close()
    assert second.averaged() == whole.averaged()
    assert len(whole.curve) == 2
    for ours, theirs in zip(second.values, whole.values, strict=True):
        assert torch.equal(ours, theirs)


def test_muon_moves_every_direction_of_a_matrix_by_about_the_same() -> None:
    chance = torch.Generator().manual_seed(3)
    for shape in ((2, 24, 8), (2, 8, 24)):
        moved = orthogonal(torch.randn(shape, generator=chance) ** 3)
        singular = torch.linalg.svdvals(moved)
        assert singular.min() > 0.6, shape
        assert singular.max() < 1.3, shape


def test_the_overlap_rises_with_the_rounds_that_were_merged() -> None:
    theta = torch.zeros(1, 2, 6)
    outer = Outer(parse_arm("merge:H=9:tau=8:rise=2"), [theta], [[0]])
    due = []
    for step in range(1, 60):
        outer.after(step)
        due += [(each.apply_at - step) for each in outer._pending if step % 9 == 0]
    assert due == [3, 4, 5, 6, 6]  # 8 (k / (k + 2)) / .9 from k = 1; nothing waits at k = 0


def test_a_piece_of_another_run_is_refused(tmp_path: Path) -> None:
    bench().save(tmp_path / "part")
    with pytest.raises(ValueError, match="another plan or text"):
        bench(learning_rate=1e-3).load(tmp_path / "part")


@pytest.mark.parametrize(("name", "millions"), [("5M", 4.9), ("25M", 25.5), ("125M", 126.5)])
def test_a_size_has_the_parameters_of_its_name(name: str, millions: float) -> None:
    count = sum(leaf.numel for leaf in leaves_of(SIZES[name]))
    assert count == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize(
    "said",
    [
        "mrge",
        "merge:h=3",
        "merge:tau=64",
        "merge:mu=1",
        "merge:H=x",
        "merge:merge=max",
        "merge:early=8/.6:late=8/.5",
        "turns:late=8/.1",
        "merge:moments=v",
        "merge:rate=0",
    ],
)
def test_an_arm_that_makes_no_sense_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_arm(said)


def test_every_rack_trains_on_its_own_text_and_the_held_out_one_is_seen_by_none() -> None:
    made = Texts(Corpus((b"a" * 90, b"b" * 40, b"c" * 30), b"d" * 50), SIZE, CPU)
    batch = made.batch([0, 1], 1)
    assert batch.shape == (2, 3, SIZE.batch, SIZE.context + 1)
    assert [set(batch[:, rack].flatten().tolist()) for rack in range(3)] == [{97}, {98}, {99}]
    assert set(made.held_out(9).flatten().tolist()) == {100}


def test_windows_depend_on_seed_and_step_alone() -> None:
    text, again = bench().texts, bench().texts
    assert torch.equal(text.batch([1], 7), again.batch([0, 1], 7)[1:])
    assert not torch.equal(text.batch([1], 7), text.batch([1], 8))
    assert not torch.equal(text.batch([1], 7), text.batch([0], 7))


def report(*seeds: float | None, arm: str) -> dict[str, Any]:
    return {
        "plan": {"size": "5M", "racks": 2, "steps": 9, "warm": 0, "learning_rate": 0.1},
        "text": {"sha256": "0" * 64, "bytes": [9, 9, 9]},
        "machine": {"device": "cpu", "torch": "2"},
        "losses": {arm: [list(seeds)]},
        "command": arm,
    }


def test_a_table_pairs_arms_by_seed_also_of_two_runs() -> None:
    runs = [report(2.0, 4.0, arm="merge"), report(1.8, 3.8, arm="merge:mu=.5")]
    text = quality_gpu_table.page([*runs, report(None, 4.0, arm="merge:mu=.9")])
    assert "| `merge:mu=.5` | 2 | 2.8000 | -7.50 [-39.2" in text  # 12.706 * 2.5 each way
    assert "| `merge:mu=.9` | 2 | inf | - | - |" in text, "an arm that diverged is shown as such"
    other = {**runs[1], "text": {"sha256": "1" * 64, "bytes": [9, 9, 9]}}
    assert "-7.50" not in quality_gpu_table.page([runs[0], other]), "another text"


def test_means_of_the_last_models_are_compared_with_those_of_data_parallel() -> None:
    runs = [report(2.0, 4.0, arm="dp"), report(2.2, 4.4, arm="merge")]
    runs[0]["averaged"], runs[1]["averaged"] = (
        {"2": {"dp": [1.0, 2.0]}},
        {"2": {"merge": [1.2, 2.4]}},
    )
    text = quality_gpu_table.page(runs)
    assert "mean of 2, above dp's, % |" in text
    assert "| 1.8000, +20.00 [+20.00, +20.00] |" in text


def test_uneven_racks_are_compared_with_even_ones_that_make_as_many_steps() -> None:
    said = "merge:tau=8:speeds=1/.6"
    runs = [report(1.0, 1.0, arm="merge:tau=8"), report(2.0, 2.0, arm="merge:tau=8:speeds=.8")]
    text = quality_gpu_table.page([*runs, report(2.2, 2.2, arm=f"{said}:weight=alike")])
    assert text.count("| +10.00 [+10.00, +10.00] |") == 1


def test_the_kept_page_is_that_of_the_kept_runs() -> None:
    kept = ROOT / "benchmarks/results"
    runs = [json.loads(path.read_text()) for path in sorted((kept / "quality_gpu").glob("*.json"))]
    assert len(runs) == 50
    assert quality_gpu_table.page(runs) == (kept / "quality_gpu.md").read_text()


# ------------------------------------------------------------------ as a command


def test_the_command_ends_in_a_piece_goes_on_and_is_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"

    def command(*more: str) -> object:
        words = (
            "--size", "tiny", "--racks", "2", "--seeds", "2", "--steps", "12", "--held-out", "2",
            "--arms", "dp,merge:H=4,merge:H=4:lr=1-.7:mu=.9:ramp=3", "--out", str(out),
            "--text", str(ROOT / "src/mend"),
        )  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["quality_gpu", *words, *more])
        try:
            quality_gpu.main()
        except SystemExit as end:
            return end.code
        return 0

    assert command("--minutes", "0") == quality_gpu.NOT_FINISHED
    assert "1 of 12 steps" in capsys.readouterr().out
    assert not out.exists()
    assert "another plan" in str(command("--learning-rate", "1"))
    assert command() == 0
    found = json.loads(out.read_text())
    assert found["looks"] == [12]
    assert set(found["losses"]) == {"dp", "merge:H=4", "merge:H=4:lr=1-.7:mu=.9:ramp=3"}
    assert not out.with_suffix(".part").exists()
    assert "is there already" in str(command())
    assert "merge:H=4" in quality_gpu_table.page([found])


def test_the_help_of_the_process_explains_every_word_of_an_arm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        quality_gpu.arguments(["--help"])
    said = capsys.readouterr().out
    for word in (*quality_gpu_outer._KEYS, *quality_gpu_outer.KINDS):
        assert word in said
