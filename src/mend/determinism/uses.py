"""The gradients of a weight that is used twice, such as an embedding that is also the head, apart.

Autograd would add the uses of every microbatch first, and the sum over the batch would depend on
the microbatch. So each use has a sum of its own, and the uses are added once, at the end. That is
known of weights with two names; other uses are found in the graph of the backward pass, and named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mend.errors import NotDeterministic

LAYERS = {"LinearBackward": 1, "CutLinearBackward": 1, "EmbeddingBackward": 0}
"""Nodes of layers -> which of their inputs is the weight."""

_CUTS = frozenset(
    f"{name}Backward0" for name in ("Select", "Slice", "Split", "SplitWithSizes", "Unbind")
)
"""Nodes that put a gradient among zeros. Parts of a weight, such as experts, have no sum."""

_SHAPES = ("T", "Transpose", "Permute", "View", "UnsafeView", "Squeeze", "Unsqueeze", "Alias")

_MOVES = (
    frozenset(f"{name}Backward0" for name in _SHAPES)
    | {"_ToTorchTensorBackward", "_FromTorchTensorBackward"}
    | _CUTS
)

_PLACES = ("_saved_dim", "_saved_index", "_saved_start", "_saved_end")

REMEDY = (
    "give every use a weight of its own, or an embedding that is also the head a second name "
    "(model.head_weight = model.words.weight)"
)

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


def unordered_uses(loss: Tensor) -> Iterator[tuple[Tensor | None, str, str]]:
    """Weights whose gradient adds up what the parts of a batch must add up apart: the weight (None:
    it is not a parameter), what is wrong with its use, and the remedy."""
    uses: dict[int, set[object]] = {}
    for node in _nodes(loss):
        for index, (child, number) in enumerate(node.next_functions):
            if child is None or node.name() in _MOVES:  # what moves is not a use by itself
                continue
            weight, part = _weight_of(child, number)
            is_layers = LAYERS.get(node.name()) == index
            if weight is None and is_layers:
                yield None, "is computed", "train what it is computed from as layers of their own"
            if weight is None or (is_layers and not part and slots_of(weight) is not None):
                continue
            parts = uses.setdefault(id(weight), set())
            if part in parts or (parts and () in (part, *parts)):
                yield weight, "is used twice", REMEDY
            parts.add(part)


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Those of the backward pass, each once."""
    todo, seen = [loss.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [child for child, _ in node.next_functions]
            yield node


def _weight_of(node: Any, number: int) -> tuple[Tensor | None, tuple[object, ...]]:
    """The parameter that output `number` of `node` is, or a part of, and which part: () is all."""
    part: tuple[object, ...] = ()
    while node is not None and node.name() in _MOVES:
        if node.name() in _CUTS:
            place = tuple(getattr(node, each, None) for each in _PLACES)
            part += (node.name(), number, place)
        node, number = node.next_functions[0]
    return getattr(node, "variable", None), part
