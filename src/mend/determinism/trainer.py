"""A training step that can be repeated with equal bits. Holds no loop and no data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, ValuesView
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mend.determinism.clipping import clip_grad_norm
from mend.determinism.collectives import all_reduce
from mend.determinism.coverage import unseen
from mend.determinism.digests import (
    digest,
    first_difference,
    optimizer_digest,
    same_bits,
    weight_digest,
)
from mend.determinism.enabling import (
    Closes,
    Determinism,
    Level,
    enable,
    enabled,
    random_state,
    say_if_tiny,
    seed_all,
    seed_of,
    set_random_state,
)
from mend.determinism.graphs import Graphs
from mend.determinism.layout import layout, rows
from mend.determinism.portable_steps import make_portable_step
from mend.determinism.stepping import make_step
from mend.determinism.trees import Stack, tree_sum
from mend.determinism.uses import separate_uses, slots_of, tied_parameters, unordered_uses
from mend.errors import ConfigError, NotDeterministic, UsageError
from mend.step_counters import announce

Batch = TypeVar("Batch")
LossFn = Callable[[nn.Module, Batch], Tensor]
"""(model, batch) -> the loss, one element."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step that was made twice gave the same bits.

    `part`: what differed first: "loss", "gradient of NAME", "weight NAME", "buffer NAME" or
    "optimizer"; None where nothing did. `digest`: of all that the first of the two steps left.
    """

    equal: bool
    part: str | None
    digest: str

    def __bool__(self) -> bool:
        return self.equal


class DeterministicTrainer(Closes):
    """Trains `model` step by step under enable(seed, level), which it calls if it is not on.

    Every step begins with generators seeded from (seed, number of the step), at level run also from
    the number of the microbatch and of the rank in the group, so that a step's bits do not depend
    on what was drawn before it: a job that goes on from a checkpoint does what it would have done,
    if `steps` is restored. A job of mend that trains `model` does that (see `state_dict`).

    `microbatches`: the batch's tensors are cut into so many along their first dimension, and the
    gradients averaged. `group`: the ranks that share the global batch (DDP, FSDP2). The rows of
    the global batch count microbatch by microbatch, and within one rank by rank.
    `grad_norm_max`: gradients are clipped to it. `cuda_graph`: level shape on one GPU: replay each
    microbatch as a CUDA graph where its shape repeats, to the same bits (graphs.py); `loss_fn` is
    then one object that depends on its arguments alone. What cannot be replayed is not, and the log
    gives the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        seed: int,
        *,
        level: Level = "run",
        scheduler: Any = None,  # torch's schedulers share no public base
        microbatches: int = 1,
        group: dist.ProcessGroup | None = None,
        grad_norm_max: float | None = None,
        cuda_graph: bool = False,
    ) -> None:
        self.model, self.optimizer, self.seed, self.scheduler = model, optimizer, seed, scheduler
        self.level, self.microbatches, self.group = level, microbatches, group
        self.grad_norm_max = grad_norm_max
        ranks = 1 if group is None else dist.get_world_size(group)
        for name, value in (("microbatches", microbatches), ("ranks of the group", ranks)):
            if value < 1 or (level != "run" and value & (value - 1)):
                rule = "a power of two at this level, where the sum over the batch is a tree"
                raise ConfigError(name, value, rule, "Take 1, 2, 4 or 8.")
        if cuda_graph and (level != "shape" or group is not None):
            rule = "needs level shape and no group: torch's own numbers and hooks are not replayed"
            raise ConfigError("cuda_graph", cuda_graph, rule, "Leave it out.")
        self._graphs = Graphs(model, microbatches > 1) if cuda_graph else None
        if level == "shape" and all(each.is_cpu for each in model.parameters()):
            say_if_tiny(sum(each.numel() for each in model.parameters()))
        self.steps = 0
        self._walked: set[tuple[torch.Size, ...]] = set()
        self._own: Determinism | None = None
        active = enabled()
        if active is None:
            self._own = enable(seed, level)
        elif (active.seed, active.level) != (seed, level):
            raise UsageError(
                f"the trainer asks for seed {seed}, level {level}, and seed {active.seed}, level "
                f"{active.level} is enabled; close() that one, or ask for the same"
            )

    def step(self, batch: Batch, loss_fn: LossFn[Batch]) -> Tensor:
        """Forward, backward, optimizer and scheduler; returns the loss of the global batch.

        Raises UsageError at the first step of a job that resumed or joined without the number of
        steps that this trainer had made.
        """
        announce(self)
        loss = self._gradients(batch, loss_fn)
        if self.grad_norm_max is not None:
            clip_grad_norm(self.model.parameters(), self.grad_norm_max)
        if self.level == "everywhere":
            make_portable_step(self.optimizer)
        else:
            make_step(self.optimizer)
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1
        return loss

    def verify_determinism(self, batch: Batch, loss_fn: LossFn[Batch]) -> Verdict:
        """Make the next step twice and compare all bits; then restore the state before it.

        Needs memory for three copies of weights, gradients and optimizer state.
        """
        announce(self)  # before the snapshot, as the job may load `steps`
        before = _Snapshot(self)
        loss = self.step(batch, loss_fn)
        first = _Snapshot(self)
        before.put_back(self)
        again = self.step(batch, loss_fn)
        part = "loss" if not same_bits(loss, again) else first.difference(_Snapshot(self))
        before.put_back(self)
        return Verdict(part is None, part, first.digest)

    def digest(self) -> str:
        """Digest of weights, buffers, optimizer, scheduler and the number of steps."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        weights, optimizer = weight_digest(self.model), optimizer_digest(self.optimizer)
        return digest([weights, optimizer, scheduler, self.steps])

    def state_dict(self) -> dict[str, int]:
        """The number of steps, which every step's seed depends on; no weights, no optimizer.

        A job registers a trainer of its model at the trainer's first step, unless the script has
        called `runtime.register_state`: a rack that resumes or joins goes on with the seeds of its
        next step, and does not begin again with those of the first.
        """
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]

    def close(self) -> None:
        """Restore the switches, if this trainer set them."""
        if self._own is not None:
            self._own.close()

    def _gradients(self, batch: Batch, loss_fn: LossFn[Batch]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        sums = _GradientSums(self.model, self.level != "run", self.group is not None)
        if self.microbatches == 1 and not sums.are_wide:
            return self._backward(batch, loss_fn, 0)
        losses = Stack()
        with sums:
            for number, part in enumerate(cut(batch, self.microbatches)):
                losses.push(self._backward(part, loss_fn, number))
                sums.take()
        sums.put_back()
        return losses.total()

    def _backward(self, batch: Batch, loss_fn: LossFn[Batch], number: int) -> Tensor:
        """Makes the gradients of one microbatch; returns its share of the global batch's loss."""
        ranks, rank = 1, 0
        if self.group is not None:
            ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        part, seed, packed = number * ranks + rank, seed_of(self.seed, self.steps), layout().lengths
        # At level shape dropout goes by the row, and each part draws the same names of layers.
        begin = partial(seed_all, seed_of(seed, part) if part and self.level == "run" else seed)
        begin()
        count = rows_in(batch)
        if self.level != "run":
            refuse_unknown_rows(batch, ranks, self.microbatches)

        def run(batch: Batch) -> Tensor:
            loss = loss_fn(self.model, batch)
            if loss.numel() != 1:
                raise UsageError(f"loss_fn returned {loss.numel()} elements; return the loss, one")
            if self.microbatches > 1:
                loss = loss / self.microbatches
            self._refuse_unordered(batch, loss)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        with rows(part * (len(packed) or count), 0 if packed else count):
            if self._graphs is None:
                loss = run(batch)
            else:
                loss = self._graphs.backward(batch, run, begin, self.steps, loss_fn)
        if self.group is not None:
            all_reduce(loss, self.group, mean=True)
        return loss

    def _refuse_unordered(self, batch: Any, loss: Tensor) -> None:
        """Once for all batches of equal shapes: weights whose gradient depends on the cut."""
        shapes = tuple(each.shape for each in tensors_in(batch))
        active = enabled()
        if self.level == "run" or active is None or shapes in self._walked:
            return
        names = {id(each): name for name, each in self.model.named_parameters()}
        for weight, fault, remedy in unordered_uses(loss):
            name = "a layer's weight" if weight is None else names.get(id(weight), "a weight")
            active.note(f"{name}, which {fault},", remedy)
        self._walked.add(shapes)


class _GradientSums:
    """The gradients of microbatches, added in the order of a tree.

    At level shape every use of a weight that is used twice has a sum of its own, and on a GPU those
    of bf16 weights are added in fp32 and rounded once; `are_wide`: there are such weights.
    """

    def __init__(self, model: nn.Module, is_shape: bool, are_ranks: bool) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        on_gpu = [each for each in self._parameters if is_shape and each.is_cuda]
        self._narrow = [each for each in on_gpu if each.dtype != torch.float32]
        self._tied = tied_parameters(model) if is_shape else []
        self.are_wide = bool(self._narrow or self._tied)
        if self.are_wide and are_ranks:
            raise NotDeterministic(
                "weights that are used twice, or on GPUs are not in fp32, on several ranks",
                "untie them, and use fp32 weights with torch.autocast",
            )
        self._sums: list[dict[str, Stack]] = [{} for _ in self._parameters]
        self._used = [False] * len(self._sums)

    def __enter__(self) -> None:
        self._separate = separate_uses(self._tied)
        self._separate.__enter__()
        for parameter in self._narrow:
            parameter.grad_dtype = torch.float32

    def __exit__(self, *fault: Any) -> None:
        self._separate.__exit__(None, None, None)
        for parameter in self._narrow:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype

    def take(self) -> None:
        """The gradients of one more microbatch; they are None then."""
        for index, parameter in enumerate(self._parameters):
            grad, slots, sums = parameter.grad, slots_of(parameter), self._sums[index]
            uses = {} if slots is None else slots.take()
            if grad is not None:
                uses["other"] = grad
            self._used[index] |= bool(uses)
            uses = uses or {"other": torch.zeros_like(parameter)}
            if slots is not None and sums and sums.keys() != uses.keys():
                raise NotDeterministic(
                    f"a weight used by {', '.join(uses)} in one microbatch and by "
                    f"{', '.join(sums)} in another has no order",
                    "use it in the same way in all of them",
                )
            for kind, part in uses.items():
                sums.setdefault(kind, Stack()).push(part)
            parameter.grad = None

    def put_back(self) -> None:
        narrow = {id(each) for each in self._narrow}
        for parameter, sums, used in zip(self._parameters, self._sums, self._used, strict=True):
            if len(sums) == 1:
                # New memory is not filled first; plain tensors, as several ranks have no narrow.
                with unseen() if id(parameter) in narrow else nullcontext():
                    total = next(iter(sums.values())).total(parameter.dtype)
            else:
                uses = [sums[kind].total() for kind in sorted(sums)]
                total = tree_sum(torch.stack(uses), 0).to(parameter.dtype)
            parameter.grad = total if used else None


def cut(batch: Any, parts: int) -> list[Any]:
    """Equal parts of every tensor in nested tuples, lists and dicts, along the first dimension."""
    if isinstance(batch, Tensor):
        if not batch.dim() or batch.shape[0] % parts:
            shape = tuple(batch.shape)
            raise UsageError(f"a tensor of shape {shape} cannot be cut into {parts} equal parts")
        return list(batch.chunk(parts))
    if isinstance(batch, (Mapping, tuple, list)) and not batch:
        return [batch] * parts
    if isinstance(batch, Mapping):
        columns = [cut(value, parts) for value in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(batch, (tuple, list)):
        columns = [cut(value, parts) for value in batch]
        make = getattr(batch, "_make", type(batch))  # of a named tuple
        return [make(row) for row in zip(*columns, strict=True)]
    raise UsageError(f"a {type(batch).__name__} cannot be cut into microbatches; give tensors")


def rows_in(batch: Any) -> int:
    """Rows of the first tensor in nested tuples, lists and dicts; 0 where there is none."""
    return next((each.shape[0] for each in tensors_in(batch) if each.shape[0]), 0)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Those that have dimensions, in nested tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
        return
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(parts, (ValuesView, tuple, list)):
        for part in parts:
            yield from tensors_in(part)


def refuse_unknown_rows(batch: Any, ranks: int, microbatches: int) -> None:
    """Raises UsageError where it is not known which rows of the global batch these are."""
    at, tensors = layout(), list(tensors_in(batch))
    shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
    if at.lengths:
        if microbatches > 1 and not any(at.packed_dims(each, each.dim()) for each in tensors):
            raise UsageError(
                f"lengths={at.lengths}: {at.tokens} tokens, and a microbatch has tensors of "
                f"{shapes}; sequences(...) takes the lengths of one microbatch, the same in all"
            )
    elif len({each.shape[0] for each in tensors}) > 1:
        raise UsageError(
            f"batch has tensors of {shapes}: their first dimensions differ, so its rows cannot be "
            "counted; expand what has fewer, such as positions and masks, or make it in loss_fn"
        )
    elif ranks > 1 and not tensors:
        raise UsageError(
            f"batch={type(batch).__name__}: it has no tensors in tuples, lists or dicts, whose "
            "rows each rank counts; give it as one of these"
        )


class _Snapshot:
    """Copies of the state that a step changes."""

    def __init__(self, trainer: DeterministicTrainer) -> None:
        model = trainer.model
        self.digest = trainer.digest()
        weights = ((f"weight {name}", each) for name, each in model.named_parameters())
        buffers = ((f"buffer {name}", each) for name, each in model.named_buffers())
        self._tensors: dict[str, Tensor] = {
            name: each.detach().clone() for name, each in (*weights, *buffers)
        }
        self._gradients = {
            f"gradient of {name}": parameter.grad.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        self._optimizer = copy.deepcopy(trainer.optimizer.state_dict())
        self._optimizer_digest = optimizer_digest(trainer.optimizer)
        scheduler = trainer.scheduler
        self._scheduler = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self._steps, self._random = trainer.steps, random_state()

    def difference(self, other: _Snapshot) -> str | None:
        part = first_difference(self._gradients, other._gradients)
        part = part or first_difference(self._tensors, other._tensors)
        if part is None and self._optimizer_digest != other._optimizer_digest:
            return "optimizer"
        return part

    def put_back(self, trainer: DeterministicTrainer) -> None:
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(self._tensors[f"weight {name}"])
                gradient = self._gradients.get(f"gradient of {name}")
                parameter.grad = None if gradient is None else gradient.clone()
            for name, buffer in trainer.model.named_buffers():
                buffer.copy_(self._tensors[f"buffer {name}"])
        _load_exactly(trainer.optimizer, self._optimizer)
        if trainer.scheduler is not None:
            trainer.scheduler.load_state_dict(copy.deepcopy(self._scheduler))
        trainer.steps = self._steps
        set_random_state(self._random)


def _load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """load_state_dict() casts state to the type of its parameter: fp32 of bf16 weights was lost."""
    optimizer.load_state_dict(copy.deepcopy(state))
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            for name, value in state["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[parameter][name] = value.clone()
