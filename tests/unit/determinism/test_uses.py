"""A weight that is used twice has a gradient for each use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mend.determinism.uses import separate_uses, slots_of, tied_parameters
from mend.errors import NotDeterministic


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight
        self.other = nn.Linear(3, 3)


def test_weights_with_two_names_are_tied() -> None:
    model = Tied()
    assert [id(each) for each in tied_parameters(model)] == [id(model.words.weight)]
    assert tied_parameters(nn.Linear(2, 2)) == []


def test_slots_last_as_long_as_the_with() -> None:
    model = Tied()
    with separate_uses(tied_parameters(model)):
        assert slots_of(model.words.weight) is not None
        assert slots_of(model.other.weight) is None
    assert slots_of(model.words.weight) is None


def test_two_uses_of_one_kind_are_refused() -> None:
    model = Tied()
    with separate_uses(tied_parameters(model)):
        slots = slots_of(model.words.weight)
        assert slots is not None
        slots.put("embedding", torch.zeros(1))
        slots.put("linear", torch.ones(1))
        assert slots.take().keys() == {"embedding", "linear"}
        slots.put("linear", torch.ones(1))
        with pytest.raises(NotDeterministic, match="used twice by linear"):
            slots.put("linear", torch.ones(1))
