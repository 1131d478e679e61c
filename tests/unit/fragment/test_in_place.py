"""Parameters that stop being the ones that mend was given are noticed before they are read or
written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mend.errors import UsageError
from mend.fragment.in_place import InPlace
from tests import golden


def watched() -> tuple[nn.Sequential, InPlace]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    guard = InPlace(model)
    guard.watch(model, {id(p) for p in model.parameters()})
    guard.check()
    return model, guard


def test_a_parameter_that_was_replaced_is_not_exchanged_unseen() -> None:
    """A late fully_shard, load_state_dict(assign=True): nobody trains the old one any more."""
    model, guard = watched()
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()})
    guard.check()
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    with golden.raises(UsageError):
        guard.check()


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight


def transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t()


@pytest.mark.parametrize("of", [whole, transposed])
def test_elements_that_become_another_parameters_are_noticed(
    of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Both racks ended `merged` with equal digests, and one of the two parameters was not the
    anchor's: the write of the other had replaced it."""
    model, guard = watched()
    first, second = (layer.weight for layer in model)
    second.data = of(first.data)
    for _ in range(2):
        with golden.raises(UsageError):
            guard.check()
    second.data = of(first.data).clone()
    guard.check()


def test_elements_in_one_place_are_noticed() -> None:
    model, guard = watched()
    model[0].weight.data = torch.zeros(1).expand(2, 2)
    with golden.raises(UsageError):
        guard.check()


def test_elements_may_move_to_memory_of_their_own() -> None:
    """An offload to the host and back, a flat buffer for all of them: nothing is shared."""
    model, guard = watched()
    flat = torch.cat([p.data.reshape(-1) for p in model.parameters()])
    sizes = [p.numel() for p in model.parameters()]
    for p, data in zip(model.parameters(), flat.split(sizes), strict=True):
        p.data = data.view(p.shape)
    guard.check()
