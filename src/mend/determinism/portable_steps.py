"""Steps of AdamW, Adam and SGD at level everywhere: torch's formulas from single operations,
because torch's own kernels fuse them on one device and not on another."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mend.determinism.coverage import unseen
from mend.errors import NotDeterministic

UNKNOWN = ("amsgrad", "maximize", "nesterov", "dampening", "capturable", "differentiable")
"""Options that must be off."""


def make_portable_step(optimizer: torch.optim.Optimizer) -> None:
    """optimizer.step(), with its hooks and the state that torch's has. `fused` and `foreach` change
    nothing.

    Raises NotDeterministic, by name, for another optimizer, option or type of weights.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers ask for
    torch.optim.Optimizer.profile_hook_step(_step)(optimizer)


@torch.no_grad()
def _step(optimizer: torch.optim.Optimizer) -> None:
    steps: dict[type, Any] = {
        torch.optim.AdamW: _step_adam,
        torch.optim.Adam: _step_adam,
        torch.optim.SGD: _step_sgd,
    }
    kind = type(optimizer)
    if kind not in steps:
        raise NotDeterministic(
            f"the optimizer {kind.__name__} is not defined at level everywhere",
            "use AdamW, Adam or SGD",
        )
    for group in optimizer.param_groups:
        if used := [name for name in UNKNOWN if group.get(name)]:
            raise NotDeterministic(
                f"{kind.__name__} with {', '.join(used)} is not defined at level everywhere",
                "leave it out",
            )
        if not isinstance(group["lr"], (int, float)):
            raise NotDeterministic("a learning rate that is a tensor", "use a number")
        for parameter in group["params"]:
            if parameter.grad is not None:
                _refuse_kind(parameter)
                with unseen():
                    steps[kind](parameter, parameter.grad, optimizer.state[parameter], group)


def _refuse_kind(parameter: Tensor) -> None:
    if type(parameter.grad) is not Tensor or parameter.dtype != torch.float32:
        raise NotDeterministic(
            f"a step on weights of {parameter.dtype}, in a {type(parameter.grad).__name__}, is not "
            "defined at level everywhere",
            "use plain float32 weights",
        )


def _step_adam(weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    beta_1, beta_2 = group["betas"]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
    state["step"] += 1
    count, first, second = int(state["step"]), state["exp_avg"], state["exp_avg_sq"]
    if group["weight_decay"]:
        if group.get("decoupled_weight_decay", False):
            weight.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            grad = grad + weight * group["weight_decay"]
    first.mul_(beta_1).add_(grad * (1 - beta_1))
    second.mul_(beta_2).add_(grad * grad * (1 - beta_2))
    scale = 1 / math.sqrt(1 - _power(beta_2, count))
    step = group["lr"] / (1 - _power(beta_1, count))
    weight.sub_(first / (second.sqrt() * scale + group["eps"]) * step)


def _step_sgd(weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if group["weight_decay"]:
        grad = grad + weight * group["weight_decay"]
    if group["momentum"]:
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = grad.clone()
        else:
            state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
        grad = state["momentum_buffer"]
    weight.sub_(grad * group["lr"])


def _power(base: float, exponent: int) -> float:
    """base ** exponent by products: C libraries round their own pow differently."""
    result = 1.0
    while exponent:
        result = result * base if exponent & 1 else result
        base, exponent = base * base, exponent >> 1
    return result
