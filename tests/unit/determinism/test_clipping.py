"""Clipping gives the bits of torch's, and does not need gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mend.determinism import enable, kernels
from mend.determinism.clipping import clip_grad_norm
from mend.determinism.coverage import unseen
from mend.determinism.digests import same_bits


@pytest.mark.parametrize("norm_max", [0.5, 1e6])
def test_clipping_is_torchs_to_the_bit(norm_max: float) -> None:
    with enable(1, "shape"):
        models = [nn.Linear(5, 3), nn.Linear(5, 3)]
        for model in models:
            for number, each in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(number)
                each.grad = torch.randn(each.shape, generator=generator)
        ours = clip_grad_norm(models[0].parameters(), norm_max)
        theirs = nn.utils.clip_grad_norm_(models[1].parameters(), norm_max)
        assert same_bits(ours, theirs)
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert same_bits(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_norm_does_not_depend_on_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of many shapes share calls, in pieces where they are large."""
    shapes = [(3, 5), (7, 5), (), (5,), (3, 40), (2, 3, 5), (1, 5), (40,)]
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(4)) for shape in shapes]
    with enable(1, "shape"):
        with unseen():
            together = kernels.norms_of(tensors)
        monkeypatch.setattr(kernels, "ELEMENTS_MAX", 20)
        with unseen():
            pieces = kernels.norms_of(tensors)
        for each, one, other in zip(tensors, together, pieces, strict=True):
            assert same_bits(one, torch.linalg.vector_norm(each))
            assert same_bits(one, other)
            assert torch.isclose(one, each.double().square().sum().sqrt().float())


def test_nothing_to_clip() -> None:
    assert clip_grad_norm(nn.Linear(2, 2).parameters(), 1.0) == 0
