"""Clipping gives the bits of torch's, and does not need gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mend.determinism import enable
from mend.determinism.clipping import clip_grad_norm
from mend.determinism.digests import same_bits


@pytest.mark.parametrize("norm_max", [0.5, 1e6])
def test_it_is_torchs_to_the_bit(norm_max: float) -> None:
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


def test_nothing_to_clip() -> None:
    assert clip_grad_norm(nn.Linear(2, 2).parameters(), 1.0) == 0
