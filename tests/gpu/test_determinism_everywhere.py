"""Level everywhere on a GPU: bits and digests are those of every CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks._determinism_trainings import DIGESTS, TRAININGS, train
from mend.determinism import chains, enable
from mend.determinism.digests import same_bits
from mend.errors import NotDeterministic
from mend.kernels import elementary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", TRAININGS)
def test_training_has_the_pinned_digest(name: str, microbatches: int) -> None:
    assert train(name, "cuda", microbatches)[-1] == DIGESTS[name]


@pytest.mark.parametrize("name", [*elementary.UNARY, *elementary.BINARY])
def test_function_has_the_bits_of_the_cpu(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.cat([torch.randn(100_003, generator=generator) * s for s in (1e-3, 1.0, 30.0, 1e4)])
    given = [x] if name in elementary.UNARY else [x.flip(0), x]
    found = chains.apply(name, *(each.cuda() for each in given)).cpu()
    expected = chains.apply(name, *given)
    numbers = expected == expected
    assert torch.equal(found == found, numbers)
    assert same_bits(found[numbers], expected[numbers])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 65, 67, 33), (3, 128, 132, 100)])
def test_product_has_the_bits_of_the_cpu(shape: tuple[int, int, int, int]) -> None:
    batch, rows, columns, pairs = shape
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(batch, rows, pairs, generator=generator)
    b = torch.randn(batch, pairs, columns, generator=generator)
    expected = chains.product(a, b)
    for left in (a.cuda(), a.transpose(1, 2).cuda().contiguous().transpose(1, 2)):
        for right in (b.cuda(), b.transpose(1, 2).cuda().contiguous().transpose(1, 2)):
            assert same_bits(chains.product(left, right).cpu(), expected)


def test_division_by_a_number_has_the_bits_of_the_cpu() -> None:
    x = torch.randn(10_007)
    with enable(1, "everywhere"):
        assert same_bits((x.cuda() / 3).cpu(), x / 3)
        assert same_bits(x.cuda().div_(0.1).cpu(), x / 0.1)


def test_generator_of_the_gpu_is_refused() -> None:
    with enable(1, "everywhere"), pytest.raises(NotDeterministic, match="Generator"):
        torch.randn(3, device="cuda", generator=torch.Generator("cuda"))
