"""RMSNorm is one node of autograd's graph, so that its gradient has one order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mend.determinism.digests import same_bits
from tests.unit.determinism.numbers import noise

pytestmark = pytest.mark.usefixtures("shape_level")


def test_norm_is_one_operator() -> None:
    """As five, the gradient of an input that something else uses depended on how it was used: alone
    it was (other + first) + second, inside of another function other + (first + second)."""
    x = noise(3, 8).requires_grad_()
    assert F.rms_norm(x, (8,)).grad_fn.name() == "RmsNormBackward"  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_is_the_formula_within_rounding(dtype: torch.dtype) -> None:
    x, weight = noise(3, 5, 8).to(dtype).requires_grad_(), noise(8, seed=2).to(dtype)
    weight.requires_grad_()
    out = F.rms_norm(x, (8,), weight)
    assert out.dtype == dtype
    out.sum().backward()
    y, other = (each.detach().double().requires_grad_() for each in (x, weight))
    expected = y * (y.square().mean(-1, keepdim=True) + torch.finfo(dtype).eps).rsqrt() * other
    expected.sum().backward()
    close = {"rtol": 0, "atol": 0.1 if dtype == torch.bfloat16 else 1e-4}
    assert torch.allclose(out.double(), expected, **close)
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.allclose(x.grad.double(), y.grad, **close)  # type: ignore[arg-type]
    assert torch.allclose(weight.grad.double(), other.grad, **close)  # type: ignore[arg-type]


def test_a_row_has_its_bits_in_any_batch() -> None:
    x, weight = noise(6, 5, 24), noise(24, seed=2)
    assert same_bits(F.rms_norm(x, (24,), weight)[2:3], F.rms_norm(x[2:3], (24,), weight))
