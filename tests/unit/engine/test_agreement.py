"""Whether merged racks went the same way, as a report says it."""

from __future__ import annotations

import pytest
import torch

from mend.codec import CODECS
from mend.engine.compute.agreement import COMPARED_MIN, Agreement, cosine_of
from mend.engine.compute.numerics import Numerics
from mend.merge import Average
from mend.outer import Nesterov

FLOAT32 = CODECS["float32"]()


def sent(*deltas: list[float]) -> list[torch.Tensor]:
    return [FLOAT32.encode(torch.tensor(delta)) for delta in deltas]


@pytest.mark.parametrize(
    ("deltas", "cosine"),
    [
        (([1.0, 0.0], [5.0, 0.0]), 1.0),
        (([1.0, 0.0], [0.0, 2.0]), 0.0),
        (([1.0, 0.0], [-3.0, 0.0]), -1.0),
        (([1.0, 0.0], [1.0, 0.0], [0.0, 1.0]), 1 / 3),
        (([1.0, 0.0],), None),
        (([1.0, 0.0], [0.0, 0.0]), None),
        (([], []), None),
    ],
)
def test_cosine_is_the_mean_of_all_pairs(deltas: tuple[list[float], ...], cosine: float) -> None:
    found = cosine_of(FLOAT32, sent(*deltas), len(deltas[0]))
    assert found == (None if cosine is None else pytest.approx(cosine, abs=1e-6))


def test_long_vectors_are_compared_in_their_middle() -> None:
    one, two = torch.ones(300_000), torch.ones(300_000)
    two[:100_000] = -1.0
    assert cosine_of(FLOAT32, [FLOAT32.encode(one), FLOAT32.encode(two)], 300_000) == (
        pytest.approx(1.0)
    )


def test_deltas_of_a_merge_are_compared() -> None:
    numerics = Numerics(FLOAT32, Average(), Nesterov(1.0, 0.5))
    forth = sent([1.0, 1.0], [1.0, 1.0])
    first = numerics.merge(forth, [0.5, 0.5], numerics.genesis(torch.zeros(2)), 1)
    assert numerics.compare(forth, first) == pytest.approx(1.0)


def test_sums_give_means() -> None:
    seen = Agreement().merged().with_cosine(0.5, 2).merged().with_cosine(None, 2)
    assert (seen.merges, seen.cosine) == (2, 0.5)
    assert Agreement().cosine is None


@pytest.mark.parametrize(
    ("cosine", "racks", "merges", "apart"),
    [
        (-0.31, 2, COMPARED_MIN, True),
        (-0.31, 2, COMPARED_MIN - 1, False),
        (-0.29, 2, COMPARED_MIN, False),
        (-0.11, 4, COMPARED_MIN, True),
        (-0.09, 4, COMPARED_MIN, False),
    ],
)
def test_racks_are_apart_by_the_least_cosine_that_so_many_can_have(
    cosine: float, racks: int, merges: int, apart: bool
) -> None:
    seen = Agreement()
    for _ in range(merges):
        seen = seen.merged().with_cosine(cosine, racks)
    assert seen.apart is apart
