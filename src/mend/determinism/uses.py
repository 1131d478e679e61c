"""The gradients of a weight that is used twice, such as an embedding that is also the head, apart.

Autograd would add the uses of every microbatch first, and the sum over the batch would depend on
the microbatch. So each use has a sum of its own, and the uses are added once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from mend.errors import NotDeterministic

_slots: dict[int, Slots] = {}
"""By the id of the parameter, while separate_uses() holds it."""


class Slots:
    """The gradients of one parameter, by the kind of its use."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def put(self, kind: str, gradient: Tensor) -> None:
        if kind in self.gradients:
            raise NotDeterministic(
                f"a weight that is used twice by {kind} has no order at level shape",
                "give every use a weight of its own",
            )
        self.gradients[kind] = gradient

    def take(self) -> dict[str, Tensor]:
        taken, self.gradients = self.gradients, {}
        return taken


def tied_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that have two names or more, in the order of the first."""
    seen: set[int] = set()
    tied: dict[int, nn.Parameter] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            tied[id(parameter)] = parameter
        seen.add(id(parameter))
    return list(tied.values())


@contextmanager
def separate_uses(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, layers put the gradients of `parameters` into slots, and give none to autograd."""
    _slots.update({id(parameter): Slots() for parameter in parameters})
    try:
        yield
    finally:
        for parameter in parameters:
            _slots.pop(id(parameter), None)


def slots_of(weight: Tensor) -> Slots | None:
    """None: the weight is used once, as far as is known."""
    return _slots.get(id(weight))
