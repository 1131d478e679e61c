"""Dropout by a counter: an element's fate does not depend on the batch around it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mend.determinism import rows, sequences
from mend.determinism.chance import kept_elements
from mend.determinism.digests import same_bits
from mend.errors import NotDeterministic

pytestmark = pytest.mark.usefixtures("shape_level")


def test_a_share_of_p_is_dropped_and_the_rest_scaled() -> None:
    x = torch.ones(64, 32, 16)
    out = nn.Dropout(0.25)(x)
    assert abs(float((out == 0).float().mean()) - 0.25) < 0.01
    assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}


def test_rows_layers_and_steps_differ() -> None:
    x = torch.ones(4, 64)
    torch.manual_seed(3)
    first, second = nn.functional.dropout(x, 0.5), nn.functional.dropout(x, 0.5)
    torch.manual_seed(3)
    again = nn.functional.dropout(x, 0.5)
    assert same_bits(first, again)
    assert not same_bits(first, second)
    assert not same_bits(first[0], first[1])


def test_dropout_goes_by_the_row_of_the_global_batch() -> None:
    x = torch.ones(8, 5, 6)
    whole = kept_elements(x, 0.5, 99)
    with rows(4):
        assert torch.equal(kept_elements(x[:4], 0.5, 99), whole[4:])
    assert torch.equal(kept_elements(x[:, :3], 0.5, 99), whole[:, :3]), "padding behind"


def test_packed_is_padded() -> None:
    padded = kept_elements(torch.ones(2, 5, 6), 0.5, 99)
    with sequences([3, 5]):
        packed = kept_elements(torch.ones(1, 8, 6), 0.5, 99)
        flat = kept_elements(torch.ones(8, 6), 0.5, 99)
    assert torch.equal(packed[0], torch.cat([padded[0, :3], padded[1]]))
    assert torch.equal(flat, packed[0])


def test_packed_is_padded_where_tokens_have_heads() -> None:
    padded = kept_elements(torch.ones(2, 5, 3, 6), 0.5, 99)
    with sequences([3, 5]):
        packed = kept_elements(torch.ones(1, 8, 3, 6), 0.5, 99)
        with pytest.raises(NotDeterministic, match="put them first"):
            kept_elements(torch.ones(1, 3, 8, 6), 0.5, 99)
        pooled = kept_elements(torch.ones(2, 4), 0.5, 99)
    assert torch.equal(packed[0], torch.cat([padded[0, :3], padded[1]]))
    assert torch.equal(pooled, kept_elements(torch.ones(2, 4), 0.5, 99)), "a row per sequence"


def test_checkpointing_draws_the_same() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x, grads = torch.randn(4, 8), []
    for way in (lambda x: checkpoint(model, x, use_reentrant=False), model):
        torch.manual_seed(3)
        model.zero_grad()
        way(x).sum().backward()
        grads.append([each.grad.clone() for each in model.parameters()])  # type: ignore[union-attr]
    for one, other in zip(*grads, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_nothing_to_drop(p: float, train: bool) -> None:
    x = torch.randn(4)
    assert same_bits(torch.dropout(x, p, train), x)
    assert torch.dropout(x, 1.0, True).abs().max() == 0
