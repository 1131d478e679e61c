"""What every outer optimizer must be: the same bits however a vector is cut, nothing kept from call
to call but in its states, which travel with the anchor. One suite, over all that are registered and
one that is written here, as a user's package would.

Legend: N elements of an anchor.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mend.codec import CODECS
from mend.engine.compute.numerics import Numerics
from mend.errors import ConfigError
from mend.merge import MERGES
from mend.outer import OUTERS, Make, Nesterov, OuterOptimizer, Rates, register
from tests.process.racks import Nursery

ROOT = Path(__file__).parents[2]
NUMEL = 70_001
PARTS = (Fraction(1), Fraction(1, 3))


class FedAdam:
    """A user's own, with two vectors, as docs/internals/numerics.md shows it."""

    name, states = "fedadam", ("first", "second")

    def __init__(self, lr: float, momentum: float, ramp: int) -> None:
        self.lr, self.momentum = lr, momentum

    def rates(self, rounds: Fraction, part: Fraction, *, plain: bool) -> Rates:
        return Rates(lr=float(part) * self.lr, momentum=self.momentum)

    def block(
        self,
        anchor_N: Tensor,
        states_N: Sequence[Tensor],
        delta_N: Tensor,
        anchor_out_N: Tensor,
        states_out_N: Sequence[Tensor],
        rates: Rates,
    ) -> None:
        news_N = (delta_N, delta_N * delta_N)
        for decay, new_N, old_N, out_N in zip(
            (rates.momentum, 0.99), news_N, states_N, states_out_N, strict=True
        ):
            torch.mul(old_N, decay, out=out_N)
            out_N.add_(new_N * (1 - decay))
        first_N, second_N = states_out_N
        torch.sub(anchor_N, first_N / (second_N.sqrt() + 1e-8) * rates.lr, out=anchor_out_N)


MADE: dict[str, Make] = {**OUTERS, "fedadam": FedAdam}

every = pytest.mark.parametrize("name", sorted(MADE))
momenta = pytest.mark.parametrize("momentum", [0.0, 0.875])


def noise(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def stepped(
    outer: OuterOptimizer, part: Fraction, cuts: Sequence[int] = (0, NUMEL)
) -> list[Tensor]:
    """Anchor and states behind one step, in blocks between the cuts."""
    before = [noise(1), *(noise(2 + i).abs() for i in range(len(outer.states)))]
    held, delta = [each.clone() for each in before], noise(9)
    after = [torch.full((NUMEL,), math.nan) for _ in before]
    rates = outer.rates(Fraction(7), part, plain=False)
    for start, stop in pairwise(cuts):
        old, new = ([each[start:stop] for each in vectors] for vectors in (before, after))
        outer.block(old[0], old[1:], delta[start:stop].clone(), new[0], new[1:], rates)
    assert all(map(same, before, held)), "an anchor is never written to"
    return after


@every
@momenta
def test_bits_do_not_depend_on_blocks_and_all_of_them_are_written(
    name: str, momentum: float
) -> None:
    outer = MADE[name](0.7, momentum, 4)
    assert outer.name == name
    assert len(set(outer.states)) == len(outer.states)
    for part in PARTS:
        whole = stepped(outer, part)
        assert all(bool(torch.isfinite(each).all()) for each in whole)
        for cuts in ((0, 1, 32, 4099, NUMEL), (0, 64, 65_536, NUMEL)):
            assert all(map(same, stepped(outer, part, cuts), whole)), cuts


@every
@momenta
def test_nothing_is_kept_from_one_step_to_the_next(name: str, momentum: float) -> None:
    used, fresh = (MADE[name](0.7, momentum, 4) for _ in range(2))
    for part in (*PARTS, PARTS[0]):
        assert all(map(same, stepped(used, part), stepped(MADE[name](0.7, momentum, 4), part)))
    assert used.rates(Fraction(3), PARTS[1], plain=False) == fresh.rates(
        Fraction(3), PARTS[1], plain=False
    )


@every
@momenta
def test_without_a_delta_an_anchor_at_rest_stays(name: str, momentum: float) -> None:
    outer, anchor = MADE[name](0.7, momentum, 0), noise(1)
    zeros = [torch.zeros(NUMEL) for _ in outer.states]
    after = [torch.full((NUMEL,), math.nan) for _ in (anchor, *zeros)]
    rates = outer.rates(Fraction(0), Fraction(1), plain=False)
    outer.block(anchor, zeros, torch.zeros(NUMEL), after[0], after[1:], rates)
    assert torch.equal(after[0], anchor)
    assert not any(bool(each.any()) for each in after[1:])


def numerics_of(name: str, momentum: float, threads: int = 1) -> Numerics:
    outer = MADE[name](0.7, momentum, 4)
    return Numerics(CODECS["float32"](), MERGES["mean"](), outer, threads)


@every
@momenta
def test_its_states_have_the_anchors_version_digest_and_way(name: str, momentum: float) -> None:
    """Two rounds on a rack of several threads; then a donor's bytes, as another rack gets them."""
    numel, made = 2_100_000, [numerics_of(name, momentum, threads) for threads in (1, 3)]
    anchors = [numerics.genesis(noise(1, numel)) for numerics in made]
    for version in (1, 2):
        payloads = [made[0].codec.encode(noise(10 * version + rack, numel)) for rack in range(2)]
        anchors = [
            numerics.merge(payloads, [0.5, 0.5], anchor, version)
            for numerics, anchor in zip(made, anchors, strict=True)
        ]
    one, three = anchors
    assert len(one.states) == len(made[0].outer.states)
    assert same(one.data, three.data)
    assert one.digest == three.digest == one.recomputed()
    copy = made[0].empty(numel).copy_(one.data)
    assert made[0].adopt(copy, numel, 2, one.rounds).digest == one.digest
    for place in range(1 + len(one.states)):
        copy[numel * place + 5] += 1
        assert made[0].adopt(copy, numel, 2, one.rounds).digest != one.digest, place
        copy[numel * place + 5] = one.data[numel * place + 5]
    for numerics in made:
        numerics.close()


def test_a_rule_of_a_users_package_is_registered_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(OUTERS, "fedadam", raising=False)
    register("fedadam", FedAdam)
    register("fedadam", FedAdam)  # a script may be imported twice
    assert OUTERS["fedadam"] is FedAdam
    with pytest.raises(ConfigError, match="whose name is 'fedadam'"):
        register("adam", FedAdam)
    with pytest.raises(ConfigError, match="registered already"):
        register("nesterov", lambda lr, momentum, ramp: Nesterov(lr, momentum))

    class Twice(FedAdam):
        name, states = "twice", ("first", "first")

    with pytest.raises(ConfigError, match="Give each vector a name of its own"):
        register("twice", Twice)


RULES = """
import torch
from mend.outer import Nesterov, register

class Good(Nesterov):
    name = "good"

class Bad(Nesterov):
    name = "bad"
    def block(self, anchor_N, states_N, delta_N, anchor_out_N, states_out_N, rates):
        delta_N.sub_(delta_N.mean())  # of the block, so the bits depend on where it ends
        super().block(anchor_N, states_N, delta_N, anchor_out_N, states_out_N, rates)

register("good", Good)
register("bad", Bad)
"""


def test_an_outsider_holds_rules_of_his_own_to_this_suite(nursery: Nursery, tmp_path: Path) -> None:
    """`pytest tests/conformance -p MODULE`, as the page says."""
    (tmp_path / "my_rules.py").write_text(RULES)
    words = ["-q", "-p", "my_rules", "-p", "no:cacheprovider", "-k", "blocks", str(__file__)]
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [nursery.python, "-m", "pytest", *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 2, ended.stdout
    assert all("-bad]" in line or "[bad-" in line for line in failed), failed
