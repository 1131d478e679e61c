"""Replays forward and backward of a microbatch as a CUDA graph, so that Python starts no kernels.

Of each shape of a microbatch: the first runs as always, the second is also captured, the first of a
later step is also replayed, and from there on it is replayed if all bits were equal. Whatever
stands in the way, such as a number that Python computes anew in every step, shows in one of these;
then no microbatch is replayed, and the log gives the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mend.determinism.chance import Names, names
from mend.determinism.digests import same_bits
from mend.determinism.layout import layout
from mend.determinism.uses import slots_of

logger = logging.getLogger("mend")

GRAPHS_MAX = 2
"""Each keeps the memory of a forward and backward pass: one for the batch, one for the last, which
is often smaller."""

Run = Callable[[Any], Tensor]
"""Forward and backward of a batch; returns the loss, detached."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a microbatch leaves: of every parameter the gradient, and those of its uses by kind."""

    loss: Tensor
    gradients: list[Tensor | None]
    uses: list[dict[str, Tensor]]

    def tensors(self) -> dict[str, Tensor]:
        found = {"loss": self.loss}
        for index, (grad, uses) in enumerate(zip(self.gradients, self.uses, strict=True)):
            found |= {f"{index}.{kind}": part for kind, part in uses.items()}
            if grad is not None:
                found[str(index)] = grad
        return found

    def equals(self, other: Made) -> bool:
        mine, theirs = self.tensors(), other.tensors()
        return mine.keys() == theirs.keys() and all(
            same_bits(each, theirs[name]) for name, each in mine.items()
        )

    def copy(self) -> Made:
        """In other memory than the graph's, which the next replay overwrites."""
        gradients = [None if each is None else each.clone() for each in self.gradients]
        uses = [{kind: part.clone() for kind, part in each.items()} for each in self.uses]
        return Made(self.loss.clone(), gradients, uses)


@dataclass(slots=True)
class Graph:
    """`inputs`: what the graph reads; `made`: what it writes."""

    replay: Callable[[], None]
    inputs: list[Tensor]
    names: Names
    made: Made

    def run(self, inputs: Sequence[Tensor]) -> Made:
        for ours, given in zip(self.inputs, inputs, strict=True):
            ours.copy_(given)
        self.names.fill()
        self.replay()
        return self.made


@dataclass(slots=True)
class _Plan:
    """Of one shape. `step`: at which it was captured."""

    graph: Graph | None = None
    step: int = -1
    is_trusted: bool = False


Capture = Callable[[Callable[[], Made]], tuple[Callable[[], None], Made]]
"""Runs a function while it is recorded; returns what replays it, and what it returned."""


def capture_on_gpu(function: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
    """Raises RuntimeError for what cannot be captured, such as a wait for the GPU."""
    graph = torch.cuda.CUDAGraph()
    # Other threads of a job ask the GPU for their own work meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = function()
    return graph.replay, made


@dataclass(slots=True)
class Graphs:
    """The graphs of a model. `is_summed`: gradients of several microbatches are added, so that each
    needs memory of its own."""

    model: nn.Module
    is_summed: bool
    capture: Capture = capture_on_gpu
    why_not: str | None = None
    """Why nothing is replayed any more."""
    _plans: dict[Hashable, _Plan] = field(default_factory=dict)
    _is_full: bool = False

    def backward(
        self, batch: Any, run: Run, again: Callable[[], None], step: int, of: Hashable
    ) -> Tensor:
        """run(batch), or what has equal bits. `again`: seeds all generators as they are now; `of`:
        what else the result depends on."""
        inputs, tree = pytree.tree_flatten(batch)
        key = None if self.why_not else self._key(inputs, repr(tree), of)
        if key is None:
            return run(batch)
        plan = self._plans.get(key)
        if plan is None:
            return self._first(key, run, batch)
        if plan.graph is None:
            return self._second(plan, run, again, step, inputs, tree)
        if plan.is_trusted:
            made = plan.graph.run([each for each in inputs if isinstance(each, Tensor)])
            self._put(made.copy() if self.is_summed else made)
            return made.loss.clone()
        loss = run(batch)
        if step != plan.step:
            expected = self._take(loss)
            again()
            made = plan.graph.run([each for each in inputs if isinstance(each, Tensor)])
            plan.is_trusted = made.equals(expected)
            if not plan.is_trusted:
                self._give_up("a replay has other bits: loss_fn depends on more than its arguments")
            self._put(expected)
        return loss

    def _first(self, key: Hashable, run: Run, batch: Any) -> Tensor:
        if len(self._plans) == GRAPHS_MAX:
            if not self._is_full:
                self._is_full = True
                _say(f"more than {GRAPHS_MAX} shapes of batches, or another loss_fn in every step")
            return run(batch)
        self._plans[key] = _Plan()
        before = [each._version for each in self.model.buffers()]
        loss = run(batch)
        if before != [each._version for each in self.model.buffers()]:
            self._give_up("the model changes its buffers")
        return loss

    def _second(
        self,
        plan: _Plan,
        run: Run,
        again: Callable[[], None],
        step: int,
        inputs: Sequence[Any],
        tree: pytree.TreeSpec,
    ) -> Tensor:
        loss = run(pytree.tree_unflatten(inputs, tree))
        expected = self._take(loss)
        ours = [each.clone() if isinstance(each, Tensor) else each for each in inputs]
        tensors = [each for each in ours if isinstance(each, Tensor)]
        again()
        try:
            numbers = Names(tensors[0].device)
            with names(numbers):
                replay, made = self.capture(
                    lambda: self._take(run(pytree.tree_unflatten(ours, tree)))
                )
            plan.graph, plan.step = Graph(replay, tensors, numbers, made), step
        except RuntimeError as fault:
            self._give_up(str(fault).splitlines()[0])
        self._put(expected)
        return loss

    def _key(self, inputs: Sequence[Any], tree: str, of: Hashable) -> Hashable | None:
        """None: nothing can be replayed."""
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        parameters = list(self.model.parameters())
        if why := _obstacle(tensors, parameters):
            self._give_up(why)
            return None
        given = tuple(
            (each.shape, each.dtype, each.stride(), each.requires_grad)
            if isinstance(each, Tensor)
            else each
            for each in inputs
        )
        device = tensors[0].device.type
        key = (
            tree, given, of, layout().count,
            tuple((each.data_ptr(), each.requires_grad) for each in parameters),
            tuple(each.training for each in self.model.modules()),
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        )  # fmt: skip
        try:
            hash(key)
        except TypeError:
            self._give_up("the batch holds something other than tensors, numbers and strings")
            return None
        return key

    def _take(self, loss: Tensor) -> Made:
        gradients, uses = list[Tensor | None](), list[dict[str, Tensor]]()
        for parameter in self.model.parameters():
            gradients.append(parameter.grad)
            slots = slots_of(parameter)
            uses.append({} if slots is None else slots.take())
            parameter.grad = None
        return Made(loss, gradients, uses)

    def _put(self, made: Made) -> None:
        parts = zip(self.model.parameters(), made.gradients, made.uses, strict=True)
        for parameter, grad, uses in parts:
            parameter.grad = grad
            if (slots := slots_of(parameter)) is not None:
                slots.gradients = dict(uses)

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._plans.clear()
        _say(why)


def _obstacle(tensors: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> str | None:
    if layout().lengths:
        return "the sequences are packed"
    if any(type(each) is not nn.Parameter for each in parameters):
        return "parameters are cut over ranks"
    if any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters):
        return "parameters have hooks"
    if not tensors or any(not each.is_cuda for each in (*tensors, *parameters)):
        return "the batch and the model are not on a GPU"
    return None


def _say(why: str) -> None:
    logger.warning('mend cuda-graph state=off reason="%s"', why.replace('"', "'"))
