"""The reference against other programs: mend's own numerics in lockstep, and its own replay of runs
without lockstep."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from mend.codec import CODECS
from mend.consensus.weights import WHOLE, merge_weights, momentum_waits, part_of, stretch_of
from mend.coordination.schedule import Schedule
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics, keeps_in_weights
from mend.engine.compute.sums import factors_in, tensors_of
from mend.fragment import FragmentView, build_plan, exchanged_parameters, realign
from mend.fragment.shards import replicated
from mend.merge import MERGES
from mend.outer import Nesterov
from mend_lab.reference import (
    Applied,
    Captured,
    Commit,
    Facts,
    Named,
    Outcome,
    Rack,
    Settings,
    fp32,
    lockstep,
    replay,
    shares,
    stretch,
)
from mend_lab.reference import part as part_there
from tests.numerics.racks import FRAGMENTS, build, flat, rack, trainer

PLAIN = Settings(fragments=FRAGMENTS, period=6, overlap=2)
VARIANTS = {
    "carry": PLAIN,
    "blocking": replace(PLAIN, overlap=0),
    "long overlap": replace(PLAIN, overlap=5),
    "overwrite": replace(PLAIN, apply_mode="overwrite"),
    "blend, momentum": replace(PLAIN, apply_mode="blend", alpha=0.3, outer_lr=0.7, momentum=0.9),
    "bfloat16": replace(PLAIN, payload="bfloat16"),
    "bfloat16, momentum, equal weights": replace(
        PLAIN, payload="bfloat16", outer_lr=0.7, momentum=0.3, token_weighted=False
    ),
    **{name: replace(PLAIN, payload=name) for name in ("int8", "int4", "e3m0", "topk")},
    "int4, radial, momentum": replace(
        PLAIN, radial=(0, 2, 3), payload="int4", outer_lr=0.7, momentum=0.3
    ),
    "radial": replace(PLAIN, radial=(0, 1, 3)),
    "radial, bfloat16, momentum": replace(
        PLAIN, radial=(0, 2, 3), payload="bfloat16", outer_lr=0.7, momentum=0.3
    ),
    "ramp": replace(PLAIN, momentum=0.6, ramp=3),
    "ramp, overwrite, bfloat16": replace(
        PLAIN, apply_mode="overwrite", payload="bfloat16", outer_lr=0.7, momentum=0.9, ramp=1
    ),
    "every step": replace(PLAIN, period=1, overlap=0),
    "more fragments than steps": replace(PLAIN, period=2, overlap=1),
}


def unequal(number: int) -> Rack:
    return rack(number, tokens=lambda step: 4 + 3 * number + step % 3)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def assert_same(a: Outcome, b: Outcome) -> None:
    assert [len(v) for v in a.anchors] == [len(v) for v in b.anchors]
    for ours, theirs in zip(a.anchors, b.anchors, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(bits(x.values), bits(y.values))
            assert (x.state is None) == (y.state is None)
            assert x.state is None or torch.equal(bits(x.state), bits(y.state))
    for ours, theirs in zip(a.thetas, b.thetas, strict=True):
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(ours, theirs, strict=True))


class Live:
    """The same run made of the parts of mend: plan, view, schedule, codec, merge, outer step,
    apply."""

    def __init__(self, racks: int, settings: Settings) -> None:
        self.settings = settings
        self.models = [build() for _ in range(racks)]
        self.train = [
            trainer(m, n, lambda s, n=n: 4 + 3 * n + s % 3) for n, m in enumerate(self.models)
        ]
        self.plan = build_plan(self.models[0], 3)
        self.views = [
            [
                FragmentView(x, [dict(exchanged_parameters(m))[s.name] for s in x.slots])
                for x in self.plan
            ]
            for m in self.models
        ]
        codec = CODECS[settings.payload]()
        rule = MERGES["rda" if settings.radial else "mean"]()
        outer = Nesterov(settings.outer_lr, settings.momentum, settings.ramp)
        in_weights = keeps_in_weights(codec, settings.apply_mode)
        self.numerics = Numerics(codec, rule, outer, in_weights=in_weights)
        names = [name for name, _ in exchanged_parameters(self.models[0])]
        self.tensors = [
            tensors_of(
                replicated(layout, 1, 0).owned,
                [names.index(slot.name) not in settings.radial for slot in layout.slots],
            )
            for layout in self.plan
        ]
        self.anchors: list[list[Anchor]] = [
            [self.numerics.genesis(self.read(0, p))] for p in range(len(self.plan))
        ]
        self.applied = [[a[0] for a in self.anchors] for _ in self.models]
        self.residual: list[list[Tensor | None]] = [[None] * len(self.plan) for _ in self.models]
        self.mark = [[(0, 0)] * len(self.plan) for _ in self.models]
        self.totals = [(0, 0)] * racks
        self.before = [(0, 0)] * racks
        self.open: dict[tuple[int, int], tuple[Tensor, Tensor | None, tuple[int, int]]] = {}

    def read(self, number: int, p: int) -> Tensor:
        out = torch.empty(self.plan[p].numel)
        self.views[number][p].read(replicated(self.plan[p], 1, 0).owned, out)
        return out

    def run(self, steps: int) -> None:
        schedule = Schedule(len(self.plan), self.settings.period, self.settings.overlap)
        for step in range(1, steps + 1):
            self.before = list(self.totals)
            for n, train in enumerate(self.train):
                self.totals[n] = (self.totals[n][0] + train(step), self.totals[n][1] + 1)
            if self.settings.overlap:
                for p in schedule.captures(step - self.settings.overlap):
                    self.apply(p)
            for p in schedule.captures(step):
                self.capture(p)
                if not self.settings.overlap:
                    self.apply(p)

    def capture(self, p: int) -> None:
        payloads, work, signs = [], [], []
        for n in range(len(self.models)):
            delta = self.applied[n][p].values - self.read(n, p)
            encoded = self.numerics.encode(delta, self.residual[n][p])
            totals = self.before[n] if self.numerics.in_weights else self.totals[n]
            work.append(tuple(a - b for a, b in zip(totals, self.mark[n][p], strict=True)))
            payloads.append(encoded.payload)
            signs.append(self.numerics.signs(encoded.payload, self.applied[n][p]))
            taken = delta if encoded.sent is None else encoded.sent
            self.open[n, p] = (taken, encoded.pend, totals)
        weighted = self.settings.token_weighted
        weights = merge_weights(work, token_weighted=weighted)
        f = stretch_of(work, token_weighted=weighted, period_steps=self.settings.period)
        newest = self.anchors[p][-1]
        runs = self.runs(p, payloads, tuple(weights)) if self.settings.radial else None
        waits = momentum_waits(signs, weights)
        rates = self.numerics.rates(newest.rounds, WHOLE, len(payloads), stretch=f, waits=waits)
        version = newest.version + 1
        self.anchors[p].append(
            self.numerics.merge(payloads, weights, newest, version, runs=runs, rates=rates)
        )

    def runs(
        self, p: int, payloads: list[Tensor], weights: tuple[float, ...]
    ) -> list[tuple[int, tuple[float, ...]]]:
        """As the one rank of a rack and its leader do it."""
        total = self.numerics.total([self.numerics.measure(payloads, weights, self.tensors[p])])
        return self.tensors[p].runs(weights, factors_in(total, weights, self.tensors[p]))

    def apply(self, p: int) -> None:
        for n in range(len(self.models)):
            if (n, p) not in self.open:
                continue
            delta, pend, totals = self.open.pop((n, p))
            theta, new = self.read(n, p), self.anchors[p][-1]
            how = self.settings.apply_mode
            realign(
                theta, self.applied[n][p].values, delta, new.values, how, self.settings.alpha, theta
            )
            self.views[n][p].write(replicated(self.plan[p], 1, 0).owned, theta)
            self.applied[n][p], self.residual[n][p] = new, pend
            self.mark[n][p] = self.totals[n] if how == "overwrite" else totals


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda name: name.replace(" ", "_"))
@pytest.mark.parametrize("racks", [1, 3])
def test_the_parts_of_mend_make_the_bits_of_the_reference(variant: str, racks: int) -> None:
    settings = VARIANTS[variant]
    live = Live(racks, settings)
    names = [
        [name for name, _ in exchanged_parameters(live.models[0])].index(s.name)
        for x in live.plan
        for s in x.slots
    ]
    sizes = [len(x.slots) for x in live.plan]
    fragments, rest = [], names
    for size in sizes:
        fragments.append(tuple(rest[:size]))
        rest = rest[size:]
    live.run(25)
    outcome = lockstep(
        [unequal(n) for n in range(racks)], replace(settings, fragments=fragments), 25
    )
    for ours, theirs in zip(live.anchors, outcome.anchors, strict=True):
        assert len(ours) == len(theirs) > 3
        for mine, reference in zip(ours, theirs, strict=True):
            assert mine.version == reference.version
            assert torch.equal(bits(mine.values), bits(reference.values))
            momentum = [reference.state] if reference.state is not None else []
            for state, theirs in zip(mine.states, momentum, strict=True):
                assert torch.equal(bits(state), bits(theirs))
    for n in range(racks):
        for p in range(len(live.plan)):
            assert torch.equal(bits(live.read(n, p)), bits(outcome.thetas[n][p]))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda name: name.replace(" ", "_"))
def test_a_lockstep_run_replays_from_its_own_facts(variant: str) -> None:
    settings = VARIANTS[variant]
    run = lockstep([unequal(n) for n in range(3)], settings, 25)
    assert len(run.commits) > 9
    assert_same(run, replay([unequal(n) for n in range(3)], settings, run.facts, run.commits))


def test_the_schedule_of_the_reference_is_the_schedule_of_the_protocol() -> None:
    for fragments in (1, 2, 3, 4, 7):
        for period in (1, 2, 3, 5, 12):
            settings = Settings(fragments=[[p] for p in range(fragments)], period=period, overlap=0)
            schedule = Schedule(fragments, period, 0)
            for step in range(1, 40):
                assert schedule.captures(step) == tuple(
                    p for p in range(fragments) if settings.due(p, step)
                )


def test_the_weights_of_the_reference_are_the_weights_of_the_protocol() -> None:
    work = [(1, 1), (977, 13), (10**12, 7), (10**12 + 1, 7)]
    members = [Named(n, 1, 0, tokens, steps) for n, (tokens, steps) in enumerate(work)]
    for weighted in (True, False):
        settings = replace(PLAIN, token_weighted=weighted)
        found = shares(members, settings)
        rules: Any = {"token_weighted": weighted, "period_steps": PLAIN.period}
        assert found == merge_weights(work, token_weighted=weighted)
        for some in (members[1:], members[:3], members):
            pairs = [(each.tokens, each.steps) for each in some]
            assert stretch(some, settings) == stretch_of(pairs, **rules)
        assert all(fp32(share) == share for share in found)
        for named in range(1, 5):
            commit = Commit(0, 1, members[:named], absent=work[named:])
            s = part_there(commit, settings)
            assert s * WHOLE == part_of(work[:named], work[named:], **rules)
            assert fp32(s) == s
            assert (s == 1) == (named == 4)


# ------------------------------------------------------------------- a run without lockstep, by
# hand

ONE = replace(PLAIN, fragments=((0, 1, 2, 3),), period=4, overlap=2)


def late() -> tuple[list[Facts], list[Commit]]:
    """Rack 1 is slow. Round 1 goes without it; round 2 names its old offer (base 0, it never
    applied 1); it jumps to version 2 at once. Its next offer is dropped. Rack 0 is always in
    time."""
    on_time = Facts(
        16,
        [
            Captured(4, 0, 1), Applied(6, 0, 1), Captured(8, 0, 2), Applied(10, 0, 2),
            Captured(12, 0, 3), Applied(14, 0, 3), Captured(16, 0, 4),
        ],
    )  # fmt: skip
    slow = Facts(
        13,
        [
            Captured(4, 0, 1), Applied(6, 0, 2), Captured(8, 0, 2), Applied(12, 0, 3),
            Captured(12, 0, 3),
        ],
    )  # fmt: skip
    commits = [
        Commit(0, 1, [Named(0, 1, 0, 32, 4)]),
        Commit(0, 2, [Named(0, 2, 1, 32, 4), Named(1, 1, 0, 32, 4)]),
        Commit(0, 3, [Named(0, 3, 2, 32, 4)], dropped=[(1, 2)]),
        Commit(0, 4, [Named(0, 4, 3, 32, 4), Named(1, 3, 3, 64, 8)]),
    ]
    return [on_time, slow], commits


def go(who: Rack, first: int, last: int) -> Tensor:
    for step in range(first, last + 1):
        who.train(step)
    return flat(who)


@torch.no_grad()
def put(who: Rack, theta: Tensor) -> None:
    for p, part in zip(
        who.parameters, theta.split([p.numel() for p in who.parameters]), strict=True
    ):
        p.copy_(part.view(p.shape))


def test_late_and_dropped_offers_by_hand() -> None:
    """The same two racks once more as straight-line arithmetic, with every residual in its
    place."""
    facts, commits = late()
    out = replay([rack(0), rack(1)], replace(ONE, payload="bfloat16"), facts, commits)
    a, b = rack(0), rack(1)

    def C(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    def mean(y_a: Tensor, w_a: float, y_b: Tensor, w_b: float) -> Tensor:
        return (y_a.double() * fp32(w_a) + y_b.double() * fp32(w_b)).float()

    A0 = flat(a)
    D = A0 - go(a, 1, 4)
    x = D
    E = A0 - go(b, 1, 4)  # rack 1's first offer: named two rounds later
    A1 = A0 - C(x)
    put(a, A1 + (go(a, 5, 6) - (A0 - D)))
    e = x - C(x)
    D = A1 - go(a, 7, 8)
    x = D + e
    A2 = A1 - mean(C(x), 0.5, C(E), 0.5)
    put(a, A2 + (go(a, 9, 10) - (A1 - D)))
    e = x - C(x)
    D = A2 - go(a, 11, 12)
    x = D + e
    A3 = A2 - C(x)
    put(a, A3 + (go(a, 13, 14) - (A2 - D)))
    e = x - C(x)
    x = (A3 - go(a, 15, 16)) + e

    put(b, A2 + (go(b, 5, 6) - (A0 - E)))  # from version 0 to 2 at once
    e = E - C(E)
    go(b, 7, 12)  # captured at 8, dropped by commit 3: nothing of it happened, e stays
    put(b, A3 + (flat(b) - A2))
    E = (A3 - flat(b)) + e
    A4 = A3 - mean(C(x), 0.5, C(E), 0.5)  # 8 steps are two periods, of the same batches
    go(b, 13, 13)

    for version, expected in enumerate((A0, A1, A2, A3, A4)):
        assert torch.equal(bits(out.anchors[0][version].values), bits(expected)), version
    assert torch.equal(bits(out.thetas[0][0]), bits(flat(a)))
    assert torch.equal(bits(out.thetas[1][0]), bits(flat(b)))


def test_rounds_that_miss_a_rack_by_hand() -> None:
    """Rack 1 trains and is missing in round 1; in round 3 it is said to train no more, so rack 0 is
    alone. The momentum's ramp goes by parts of rounds: a third, then whole ones."""
    settings = replace(ONE, outer_lr=0.7, momentum=0.4, ramp=2)
    facts, commits = late()
    first, *others = commits
    first = replace(first, absent=[(128, 8)], training=True)  # tokens of a period: 32 and 64
    out = replay([rack(0), rack(1)], settings, facts, [first, *others])
    rounds = [sum(round(2**24 * s) for s in (1 / 3, 1, 1)[:n]) / 2**24 for n in range(4)]
    assert [float(anchor.rounds) for anchor in out.anchors[0][:4]] == rounds
    lr = Fraction(fp32(0.7))
    s = Fraction(round(2**24 / 3), 2**24)
    a, b = rack(0), rack(1)
    A0 = flat(a)
    D = A0 - go(a, 1, 4)
    E = A0 - go(b, 1, 4)
    m1 = D * float(s)
    A1 = A0 - D * fp32(s * lr)  # mu is 0: nothing is merged before
    put(a, A1 + (go(a, 5, 6) - (A0 - D)))
    D = A1 - go(a, 7, 8)
    mu = fp32(s / (s + 2))
    assert 0.1 < mu < 0.2
    merged = (D.double() * 0.5 + E.double() * 0.5).float()
    m2 = m1 * mu + merged
    A2 = A1 - (merged + m2 * mu) * fp32(lr)
    put(a, A2 + (go(a, 9, 10) - (A1 - D)))
    A3 = A2 - (A2 - go(a, 11, 12))
    for version, (values, momentum) in enumerate(((A1, m1), (A2, m2), (A3, m2)), start=1):
        found = out.anchors[0][version]
        assert torch.equal(bits(found.values), bits(values)), version
        assert found.state is not None
        assert torch.equal(bits(found.state), bits(momentum)), version


def test_a_replay_stops_at_the_first_contradiction() -> None:
    def tried(facts: list[Facts], commits: list[Commit]) -> None:
        replay([rack(0), rack(1)], ONE, facts, commits)

    facts, commits = late()
    tried(facts, commits)
    first, *others = commits
    with pytest.raises(AssertionError, match="was offered as"):
        tried(facts, [replace(first, members=[Named(0, 1, 0, 31, 4)]), *others])
    with pytest.raises(AssertionError, match="was offered as"):
        tried(facts, [first, replace(commits[1], members=[Named(0, 2, 0, 32, 4)]), *commits[2:]])
    with pytest.raises(AssertionError, match="nobody makes"):
        tried(facts, others)
    with pytest.raises(AssertionError, match="nobody made"):
        tried(facts, [*commits, Commit(0, 5, [Named(0, 9, 4, 32, 4)])])
    with pytest.raises(AssertionError, match="ascend"):
        tried(facts, [first, replace(commits[1], members=commits[1].members[::-1]), *commits[2:]])
    with pytest.raises(AssertionError, match="open offer"):
        tried([facts[0], Facts(8, [Captured(4, 0, 1), Captured(8, 0, 2)])], commits)
    with pytest.raises(AssertionError, match="out of order"):
        tried([facts[0], Facts(3, facts[1].events)], commits)


def test_racks_that_start_from_other_parameters_are_refused() -> None:
    other = rack(1)
    with torch.no_grad():
        other.parameters[0][0, 0] += 1
    with pytest.raises(AssertionError, match="rack 1 starts elsewhere"):
        lockstep([rack(0), other], PLAIN, 1)


@pytest.mark.parametrize("wrong", [{"overlap": 6}, {"overlap": -1}, {"apply_mode": "mix"}])
def test_settings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(PLAIN, **wrong)


def test_bfloat16_parameters_are_read_up_and_rounded_back() -> None:
    def half() -> Rack:
        return rack(0, dtype=torch.bfloat16)

    out = lockstep([half()], replace(PLAIN, overlap=0), 12)
    alone = half()
    go(alone, 1, 12)
    assert torch.equal(torch.cat(out.thetas[0]), flat(alone).float()), (
        "one rack, no overlap: plain training"
    )
