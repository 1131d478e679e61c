"""The step of an elementwise optimizer, without the watch and on this rank's shards only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mend.determinism.coverage import MODES, Coverage
from mend.determinism.sharding import local_of

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that add element by element, unless they are fused on the CPU."""


def make_step(optimizer: torch.optim.Optimizer) -> None:
    """optimizer.step(). Its operators, some ten for every parameter and more than half of a small
    model's, are not watched where they are known: those of ELEMENTWISE, with nothing added. Nor
    are they those of DTensors then, each of which costs ten times what it computes.

    torch calls the hooks for all optimizers before the optimizer's own pre-hooks and after its own
    post-hooks. So they run as in a plain step, watched and on whole DTensors: a job of mend counts
    steps and applies merged weights there."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        optimizer.step()
        return
    with ExitStack() as inside, ExitStack() as hooks:

        def enter(*_: object) -> None:
            if _is_known(optimizer):
                inside.enter_context(torch._C._ExcludeDispatchKeyGuard(MODES))
                inside.enter_context(_on_shares(optimizer))

        def leave(*_: object) -> None:
            inside.close()

        hooks.callback(optimizer.register_step_pre_hook(enter).remove)
        hooks.callback(optimizer.register_step_post_hook(leave).remove)
        optimizer.step()


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this thread's one mode is the watch, and `optimizer` and its tensors are plain, or
    whole DTensors."""
    if [type(mode) for mode in _get_current_dispatch_mode_stack()] != [Coverage]:
        return False
    step = vars(optimizer).get("step")  # a scheduler puts one there that counts calls
    patched = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    if type(optimizer) not in ELEMENTWISE or patched:
        return False
    groups = optimizer.param_groups
    plain = all(_is_plain(each) for group in groups for each in group["params"])
    on_cpu = any(each.device.type == "cpu" for group in groups for each in group["params"])
    return plain and not (on_cpu and any(group.get("fused") for group in groups))


def _is_plain(parameter: Tensor) -> bool:
    grad = parameter.grad
    if type(parameter) is DTensor:
        if parameter.device.type == "cpu" and parameter.dtype != torch.float32:
            return False  # a shard's places are not those of the whole: coverage.SCALED
        if type(grad) is not DTensor:
            return grad is None
        return grad.placements == parameter.placements and type(grad._local_tensor) is Tensor
    return type(parameter) is nn.Parameter and type(grad) in (Tensor, type(None))


@contextmanager
def _on_shares(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, `optimizer` holds this rank's shards in place of DTensors."""
    cut = [each for group in optimizer.param_groups for each in group["params"]]
    if DTensor not in map(type, cut):
        yield
        return
    local = {each: _local_parameter(each) for each in cut}
    state, parameters = optimizer.state, [group["params"] for group in optimizer.param_groups]
    inside = {
        local[each]: {name: local_of(value) for name, value in state[each].items()}
        for each in cut
        if each in state
    }
    optimizer.state = defaultdict(dict, inside)
    for group in optimizer.param_groups:
        group["params"] = [local[each] for each in group["params"]]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = params
        for each, stepped in local.items():
            for name, value in optimizer.state.get(stepped, {}).items():
                state[each][name] = _like(each, name, value, state[each].get(name))
        optimizer.state = state


def _local_parameter(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    local = nn.Parameter(local_of(parameter), parameter.requires_grad)
    local.grad = None if parameter.grad is None else local_of(parameter.grad)
    return local


def _like(parameter: Tensor, name: str, value: Any, before: Any) -> Any:
    """A state after a step: a DTensor like its parameter, but for counts of steps."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or name == "step":
        return value
    if isinstance(before, DTensor) and before._local_tensor.data_ptr() == value.data_ptr():
        return before
    mesh, places = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, places, shape=parameter.shape, stride=parameter.stride())
