"""Tensors that do not fit together are refused where torch refuses them, at every level."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mend.determinism import enable, fitting, gpu_layers, gpu_products
from mend.determinism.enabling import Level

BAD = (RuntimeError, IndexError, ValueError)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def attend(query: int, key: int, features: int = 8, **how: bool) -> Tensor:
    """Of so many heads."""
    k = ones(1, key, 4, features)
    return F.scaled_dot_product_attention(ones(1, query, 4, 8), k, k, **how)


def add_at(x: Tensor, dim: int, count: int, source: Tensor) -> Tensor:
    return x.index_add(dim, torch.arange(count), source)


def scatter(x: Tensor, dim: int, rows: int, columns: int) -> Tensor:
    return x.scatter_add(dim, torch.zeros(rows, columns, dtype=torch.int64), ones(3, 3))


UNFIT: dict[str, Callable[[], object]] = {
    "linear": lambda: F.linear(ones(2, 64), ones(5, 32)),
    "linear of few inputs": lambda: F.linear(ones(2, 10), ones(5, 64)),
    "linear of other types": lambda: F.linear(ones(3, 8), ones(4, 8).double()),
    "linear of a narrow weight": lambda: F.linear(ones(3, 8), ones(4, 8).bfloat16()),
    "matmul": lambda: ones(2, 64) @ ones(3, 2),
    "matmul of batches": lambda: ones(2, 4, 256) @ ones(2, 300, 5),
    "matmul of other batches": lambda: ones(3, 4, 8) @ ones(2, 8, 5),
    "mm of three dimensions": lambda: torch.mm(ones(2, 3, 4), ones(4, 5)),
    "mm": lambda: torch.mm(ones(2, 4), ones(5, 4)),
    "addmm": lambda: torch.addmm(ones(5), ones(2, 4), ones(3, 5)),
    "addmm to fewer rows": lambda: torch.addmm(ones(3, 5), ones(1, 4), ones(4, 5)),
    "addmm to other columns": lambda: torch.addmm(ones(3), ones(2, 8), ones(8, 4)),
    "bmm": lambda: torch.bmm(ones(2, 4, 256), ones(2, 300, 5)),
    "bmm of few pairs": lambda: torch.bmm(ones(1, 2, 64), ones(1, 3, 2)),
    "bmm of other batches": lambda: torch.bmm(ones(3, 2, 4), ones(1, 4, 2)),
    "bmm of matrices": lambda: torch.bmm(ones(2, 4), ones(4, 2)),
    "bmm of other types": lambda: torch.bmm(ones(1, 3, 8), ones(1, 8, 3).bfloat16()),
    "baddbmm": lambda: torch.baddbmm(ones(2, 4, 5), ones(2, 4, 6), ones(2, 7, 5)),
    "baddbmm to more": lambda: torch.baddbmm(ones(2, 4, 5), ones(1, 4, 6), ones(1, 6, 5)),
    "dot": lambda: torch.dot(ones(3), ones(1)),
    "attention of few features": lambda: attend(2, 2, 4),
    "attention of 6 heads and 4": lambda: attend(6, 4, enable_gqa=True),
    "attention of 2 heads and 4": lambda: attend(2, 4, enable_gqa=True),
    "attention of heads that are no groups": lambda: attend(6, 4),
    "sum": lambda: ones(3, 4).sum(5),
    "linear of three dimensions": lambda: F.linear(ones(2, 4), ones(2, 3, 4)),
    "linear with other biases": lambda: F.linear(ones(2, 4), ones(3, 4), ones(2)),
    "dropout of more than all": lambda: torch.dropout(ones(3), 1.5, True),
    "sum twice": lambda: ones(3, 4).sum((1, -1)),
    "sum of a number": lambda: torch.tensor(2.0).sum(1),
    "mean": lambda: ones(3, 4).mean(-3),
    "mean twice": lambda: ones(3, 4).mean((0, 0)),
    "var": lambda: ones(3, 4).var(9),
    "std twice": lambda: ones(3, 4).std((1, 1)),
    "norm": lambda: torch.linalg.vector_norm(ones(3, 4), dim=2),
    "softmax": lambda: ones(3, 4).softmax(2),
    "log_softmax": lambda: ones(3, 4).log_softmax(2),
    "layer_norm of half": lambda: F.layer_norm(ones(4, 10), (5,)),
    "layer_norm of others": lambda: F.layer_norm(ones(4, 10), (2, 5)),
    "layer_norm of one": lambda: F.layer_norm(ones(4, 10), (1,), ones(1)),
    "layer_norm with a weight": lambda: F.layer_norm(ones(4, 10), (10,), ones(1)),
    "layer_norm with a bias": lambda: F.layer_norm(ones(4, 10), (10,), ones(10), ones(1)),
    "rms_norm of half": lambda: F.rms_norm(ones(4, 10), (5,)),
    "rms_norm with a weight": lambda: F.rms_norm(ones(4, 10), (10,), ones(1)),
    "index_add": lambda: add_at(ones(4, 3), 0, 2, ones(3, 3)),
    "index_add of other slices": lambda: add_at(ones(4, 2, 3), 0, 2, ones(2, 3, 2)),
    "index_add of a dimension": lambda: add_at(ones(4, 3), 2, 3, ones(3, 3)),
    "scatter_add": lambda: scatter(ones(3, 3), 0, 4, 3),
    "scatter_add beside": lambda: scatter(ones(2, 2), 0, 2, 3),
    "nll_loss": lambda: torch.ops.aten.nll_loss_forward(ones(8, 5), torch.arange(4), None, 1, -100),
    "cross_entropy": lambda: F.cross_entropy(ones(8, 5), torch.arange(4)),
    "nll_loss with weights": lambda: F.nll_loss(ones(3, 5), torch.arange(3), weight=ones(9)),
    "gelu_backward": lambda: torch.ops.aten.gelu_backward(ones(3), ones(2000)),
    "sigmoid_backward": lambda: torch.ops.aten.sigmoid_backward(ones(3), ones(2000)),
}


@pytest.mark.parametrize("level", [None, "shape", "everywhere"])
@pytest.mark.parametrize("call", UNFIT.values(), ids=UNFIT.keys())
def test_tensors_that_do_not_fit_are_refused(
    call: Callable[[], object], level: Level | None
) -> None:
    if level is None:
        with pytest.raises(BAD):
            call()
        return
    with enable(1, level), pytest.raises(BAD):
        call()


FIT: dict[str, Callable[[], Tensor]] = {
    "sum of a number": lambda: torch.tensor(2.0).sum(0),
    "mean of a number": lambda: torch.tensor(2.0).mean(-1),
    "var of a number": lambda: torch.tensor(2.0).var((), correction=0),
    "linear with one bias": lambda: F.linear(ones(2, 4), ones(3, 4), ones(3)),
    "addmm with one number": lambda: torch.addmm(ones(1), ones(2, 4), ones(4, 3)),
    "addmm with a column": lambda: torch.addmm(ones(2, 1), ones(2, 4), ones(4, 3)),
    "baddbmm with a row": lambda: torch.baddbmm(ones(1, 3), ones(2, 2, 4), ones(2, 4, 3)),
    "index_add": lambda: add_at(ones(4, 3), -1, 2, ones(4, 2)),
    "scatter_add of some": lambda: scatter(ones(2, 3), 0, 3, 2),
    "attention of groups": lambda: attend(4, 2, enable_gqa=True),
}


@pytest.mark.parametrize("level", ["shape", "everywhere"])
@pytest.mark.parametrize("call", FIT.values(), ids=FIT.keys())
def test_what_fits_in_torch_has_its_shape_and_values(
    call: Callable[[], Tensor], level: Level
) -> None:
    plain = call()
    with enable(1, level):
        found = call()
    assert found.shape == plain.shape
    assert torch.allclose(found, plain, atol=1e-6)


def test_shapes_that_do_not_fit_are_named() -> None:
    with enable(1, "shape"), pytest.raises(RuntimeError, match=r"\(2, 64\) and \(32, 5\)"):
        F.linear(ones(2, 64), ones(5, 32))
    with pytest.raises(RuntimeError, match=r"\(4,\) for rows of \(8, 5\)"):
        fitting.refuse_targets(ones(8, 5), ones(4))


def test_attention_with_a_mask_and_causal_is_refused() -> None:
    """Some kernels of torch join the two, others refuse; the mask was ignored here."""
    x = ones(1, 1, 4, 8)
    with enable(1, "shape"), pytest.raises(RuntimeError, match="is_causal=True and a mask"):
        F.scaled_dot_product_attention(x, x, x, attn_mask=ones(4, 4).bool(), is_causal=True)


ON_GPU: dict[str, Callable[[], object]] = {
    "linear of other types": lambda: gpu_products.linear(ones(3, 8), ones(4, 8).bfloat16()),
    "mm of three dimensions": lambda: gpu_products.mm(ones(2, 3, 4), ones(4, 5)),
    "bmm of other types": lambda: gpu_products.bmm(ones(1, 3, 8), ones(1, 8, 3).bfloat16()),
    "layer_norm": lambda: gpu_layers.layer_norm(ones(4, 10), (10,), ones(1)),
    "rms_norm": lambda: gpu_layers.rms_norm(ones(4, 10), (5,)),
    "cross_entropy": lambda: gpu_layers.cross_entropy(ones(8, 5), torch.arange(4)),
}


@pytest.mark.parametrize("call", ON_GPU.values(), ids=ON_GPU.keys())
def test_tensors_that_do_not_fit_reach_no_kernel_of_a_gpu(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=r"shape|dtype|targets|multiplied"):
        call()


def test_products_of_a_gpu_that_do_not_fit_are_refused() -> None:
    kernels = pytest.importorskip("mend.determinism.gpu_kernels")
    with pytest.raises(RuntimeError, match="multiplied"):
        kernels.products(ones(1, 2, 64), ones(1, 3, 2))
