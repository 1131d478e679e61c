"""The kernels of level shape on a GPU, beside torch. Without a GPU in Triton's interpreter, where
Triton is installed:

    TRITON_INTERPRET=1 python -m pytest tests/unit/determinism/test_gpu_kernels.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mend.determinism import gpu_products, sequences
from mend.determinism import kernels as on_cpu
from mend.determinism.digests import same_bits
from mend.determinism.gpu_layers import _reciprocal as reciprocal
from mend.determinism.gpu_layers import deviation, rms_norm, variance
from mend.determinism.gpu_products import leaf_sum, outer_product
from mend.determinism.layout import unpack
from mend.determinism.trees import tree_sum, wide_sum
from mend.errors import NotDeterministic

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

ROUNDED = [
    torch.float32,
    torch.float16,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter truncates to bf16"),
    ),
]

pytestmark = [
    pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def kernels() -> Any:
    return pytest.importorskip("mend.determinism.gpu_kernels")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(DEVICE)


def near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=2e-5)


def test_products_are_right(kernels: Any) -> None:
    a, b = drawn(2, 70, 33), drawn(2, 50, 33).transpose(1, 2)
    assert near(kernels.products(a, b), a @ b)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("leaves", [1, 2, 3, 8, 20, 64])
def test_a_tree_has_the_bits_of_the_tree_of_the_cpu(
    kernels: Any, leaves: int, dtype: torch.dtype
) -> None:
    nodes = drawn(leaves, 9000)
    nodes[:, 7] = -0.0
    out = torch.empty(9000, device=DEVICE, dtype=dtype)
    kernels.tree(nodes, out)
    assert same_bits(out, tree_sum(nodes, 0).to(dtype))


@pytest.mark.parametrize("leaves", [0, 64, 65, 130])
def test_more_leaves_than_one_kernel_takes_are_one_tree(kernels: Any, leaves: int) -> None:
    nodes = drawn(leaves, 300)
    assert same_bits(leaf_sum(nodes), tree_sum(nodes, 0))


@pytest.mark.parametrize("leaves", [1, 3, 65])
def test_leaves_of_one_number_are_one_tree(kernels: Any, leaves: int) -> None:
    """The bias of a value head. Triton makes a constant of every argument that is 1."""
    nodes = drawn(leaves, 1)
    assert same_bits(leaf_sum(nodes), tree_sum(nodes, 0))


@pytest.mark.parametrize("dtype", ROUNDED)
def test_the_gradient_of_a_weight_does_not_depend_on_the_slabs_it_is_made_in(
    kernels: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = drawn(3, 40, 300), drawn(3, 40, 20)
    whole = outer_product(a, b)
    assert same_bits(whole, tree_sum(kernels.products(a.transpose(1, 2), b), 0))
    monkeypatch.setattr(gpu_products, "BYTES_MAX", 3 * 20 * 4 * 128)
    assert same_bits(outer_product(a, b, dtype), whole.to(dtype))


def squares_by_passes(x: Tensor, correction: float) -> Tensor:
    """The variance in passes over fp32. torch multiplies by the reciprocal on a GPU."""
    count = x.shape[-1]
    away = x.float() - (wide_sum(x, -1) * reciprocal(count))[:, None]
    return wide_sum(away * away, -1) * reciprocal(max(0.0, count - correction))


@pytest.mark.parametrize("features", [1, 2, 7, 64, 100, 1024, 1025, 5000, 16384])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_variances_have_the_bits_of_passes_over_fp32(
    kernels: Any, features: int, dtype: torch.dtype
) -> None:
    x = drawn(5, features).add(3).to(dtype)
    for correction in (0, 1, 0.3):
        expected = squares_by_passes(x, correction)
        for rounded in (torch.float32, dtype):
            scales = reciprocal(features), reciprocal(max(0.0, features - correction))
            found = kernels.row_variances(x, *scales, rounded)
            assert torch.equal(found.isnan(), expected.isnan())
            assert same_bits(found.nan_to_num(), expected.to(rounded).nan_to_num())


@pytest.mark.parametrize("keepdim", [True, False])
def test_variances_and_deviations_have_the_bits_of_the_definition(
    kernels: Any, keepdim: bool
) -> None:
    x = drawn(3, 4, 64).half().transpose(0, 1)
    for function, expected in ((variance, on_cpu.variance), (deviation, on_cpu.deviation)):
        for dim in ([-1], [2], [1], [1, 2], None):
            found = function(x, dim, correction=0, keepdim=keepdim)
            assert same_bits(found, expected(x, dim, correction=0, keepdim=keepdim))


@pytest.mark.parametrize("features", [1, 2, 7, 64, 100, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_trees_have_the_bits_of_the_tree_of_the_cpu(
    kernels: Any, features: int, dtype: torch.dtype
) -> None:
    x = drawn(37, features).to(dtype)
    x[3], x[4] = -0.0, 0.0
    assert same_bits(kernels.row_trees(x), wide_sum(x, -1))


def test_sums_over_tokens_do_not_depend_on_zeros_behind_them(kernels: Any) -> None:
    x = drawn(3, 70, 100)
    padded = F.pad(x, (0, 0, 0, 40)).contiguous()
    assert near(kernels.column_sums(x), x.sum(1))
    assert torch.equal(kernels.column_sums(padded), kernels.column_sums(x))


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("features", [300] if INTERPRETED else [300, 4096, 9000, 16384])
@pytest.mark.parametrize("is_rms", [True, False])
def test_gradients_of_a_norm_are_right_and_leaves_are_summed_alone(
    kernels: Any, is_rms: bool, features: int, dtype: torch.dtype
) -> None:
    """Narrow rows are loaded ahead, wide ones are not."""
    x, grad = (drawn(2, 35, features).to(dtype) for _ in range(2))
    grad = grad.flip(0).contiguous()
    weight, bias = drawn(2, features).to(dtype)
    _, mean, rstd = kernels.norm_forward(
        x.view(70, features), weight, None if is_rms else bias, 1e-5
    )
    dx, dw, db = kernels.norm_backward(grad, x, weight, mean, rstd, is_rms)
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    if is_rms:
        out = F.rms_norm(exact[0], (features,), exact[1], 1e-5)
    else:
        out = F.layer_norm(exact[0], (features,), exact[1], exact[2], 1e-5)
    expected = torch.autograd.grad(out, exact[:2], grad.double())
    rounding = 4 * torch.finfo(dtype).eps
    assert torch.allclose(dx.double(), expected[0], rtol=rounding, atol=rounding)
    assert near(dw.sum(0).double(), expected[1])
    if not is_rms:
        assert near(db.sum(0).double(), grad.double().sum((0, 1)))
    for leaf in range(2):
        rows = slice(35 * leaf, 35 * leaf + 35)
        alone = kernels.norm_backward(
            grad[leaf : leaf + 1], x[leaf : leaf + 1], weight, mean[rows], rstd[rows], is_rms
        )
        assert same_bits(alone[0][0], dx[leaf])
        assert same_bits(alone[1][0], dw[leaf])
        assert is_rms or same_bits(alone[2][0], db[leaf])


@pytest.mark.parametrize("leaves", [1, 2, 3, 4])
def test_the_gradient_of_an_embedding_is_the_tree_over_its_leaves(
    kernels: Any, leaves: int
) -> None:
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(0, 9, (leaves, 40), generator=generator).to(DEVICE)
    grad = drawn(leaves, 40, 20)
    whole = kernels.word_sums(words, grad, 12)
    expected = torch.zeros(12, 20, device=DEVICE)
    expected.index_add_(0, words.reshape(-1), grad.reshape(-1, 20))
    alone = [kernels.word_sums(words[i : i + 1], grad[i : i + 1], 12) for i in range(leaves)]
    assert near(whole, expected)
    assert torch.equal(whole, tree_sum(torch.stack(alone), 0))


def test_losses_are_right_and_ignore_what_is_ignored(kernels: Any) -> None:
    x = drawn(6, 5000).requires_grad_()
    target = torch.tensor([1, 2, -100, 4999, 0, 7], device=DEVICE)
    expected = F.cross_entropy(x, target, reduction="none")
    (dx,) = torch.autograd.grad(expected.sum(), x)
    losses, log_sum = kernels.loss_forward(x.detach(), target, -100)
    ones = torch.ones(6, device=DEVICE)
    assert near(losses, expected)
    assert near(kernels.loss_backward(x.detach(), target, log_sum, ones, -100), dx)


def test_a_target_outside_of_the_vocabulary_gives_nan(kernels: Any) -> None:
    losses, _ = kernels.loss_forward(drawn(2, 10), torch.tensor([10, 3], device=DEVICE), -100)
    assert losses.isnan().tolist() == [True, False]


@pytest.mark.usefixtures("kernels")
def test_norm_of_packed_heads_has_the_gradients_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_products, "_leaf_rows", 1)
    lengths, weight = (3, 40, 6), torch.linspace(0.5, 2, 8, device=DEVICE).requires_grad_()
    packed = drawn(49, 2, 8)

    def gradients(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(rms_norm(leaf, (8,), weight), (leaf, weight), grad)

    dx, dw = gradients(unpack(packed, lengths), unpack(packed.flip(0), lengths))
    with sequences(lengths):
        found_dx, found_dw = gradients(packed[None], packed.flip(0)[None])
        with pytest.raises(NotDeterministic, match="put them first"):
            gradients(packed.transpose(0, 1)[None], packed.transpose(0, 1)[None])
    assert same_bits(unpack(found_dx[0], lengths), dx)
    assert same_bits(found_dw, dw)
