"""Moments: the per-element state that an inner optimizer keeps of a parameter. Reads and writes
optimizer states; uses no peers, clocks or files.

A moment is an exponential moving average of gradients (first) or of their squares (second). Racks
average them with their own periods: DES-LOC, arXiv 2505.22549. The running statistics of a layer's
inputs (`running_statistics.py`) are averaged in the same way and share the view.

Legend: N elements of the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mend.errors import ConfigError, UsageError
from mend.fragment.parts import NO_ROWS, Rows
from mend.fragment.shards import local_of
from mend.fragment.view import FragmentView
from mend.types import MOMENT_PERIODS, Layout, Owned

Group = Mapping[str, Any]
"""A parameter group of an optimizer."""

FIRST, SECOND = 1, 2
ORDERS = {FIRST: "first", SECOND: "second"}


class Optimizer(Protocol):
    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class MomentKind(NamedTuple):
    """A state that is a moment. `beta(group)`: fraction of it that is left after a step; 0: this
    group does not keep it."""

    state: str
    order: int
    beta: Callable[[Group], float]


def _beta(position: int) -> Callable[[Group], float]:
    return lambda group: float(group["betas"][position])


def _momentum(group: Group) -> float:
    return float(group["momentum"])


_ADAM = (MomentKind("exp_avg", FIRST, _beta(0)), MomentKind("exp_avg_sq", SECOND, _beta(1)))

KINDS: dict[str, tuple[MomentKind, ...]] = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "ADOPT"), _ADAM),
    "Lion": (MomentKind("exp_avg", FIRST, _beta(1)),),
    "SGD": (MomentKind("momentum_buffer", FIRST, _momentum),),
    "Muon": (MomentKind("momentum_buffer", FIRST, _momentum),),
}
"""class of an optimizer, or of a base of it -> its moments"""


class Moment(NamedTuple):
    """One moment of one parameter. `optimizer`: torch's own, without wrappers."""

    name: str
    parameter: nn.Parameter
    optimizer: Any
    group: int
    kind: MomentKind

    def live(self) -> Tensor | None:
        """This rank's part of it; None: the optimizer has not created it yet. Raises UsageError if
        it is not a moment of this parameter."""
        state = self.optimizer.state.get(self.parameter, {})
        if state and self.kind.state not in state:
            raise UsageError(
                f"{self.name}: {type(self.optimizer).__name__} keeps {', '.join(state)}, and no "
                f"{self.kind.state}: it is not torch's. Leave {MOMENT_PERIODS[self.kind.order]} out"
            )
        found = state.get(self.kind.state)
        if found is None:
            return None
        local, like = local_of(found), local_of(self.parameter)
        if local.shape != like.shape or not local.dtype.is_floating_point:
            raise UsageError(
                f"{self.name}: {self.kind.state} of {type(self.optimizer).__name__} is "
                f"{tuple(local.shape)} {local.dtype}, the parameter {tuple(like.shape)}: such a "
                f"state cannot be averaged. Leave {MOMENT_PERIODS[self.kind.order]} out"
            )
        return local

    @property
    def order(self) -> int:
        return self.kind.order

    @property
    def beta(self) -> float:
        """beta as the optimizer has it now."""
        return self.kind.beta(self.optimizer.param_groups[self.group])


class Averaged(Protocol):
    """A tensor that all racks continue from the mean: a moment or a running statistic."""

    @property
    def name(self) -> str: ...

    @property
    def parameter(self) -> Tensor:
        """A tensor of its shape and device, as this rank holds it."""

    @property
    def order(self) -> int:
        """FIRST or SECOND, which is never negative."""

    @property
    def beta(self) -> float:
        """Fraction of it that is left after a step."""

    def live(self) -> Tensor | None:
        """This rank's part of it; None: there is none yet."""


def moments_of(
    named: Sequence[tuple[str, nn.Parameter]],
    optimizers: Sequence[Optimizer],
    order: int,
    period: int,
) -> list[Moment]:
    """The moments of `order` of the named parameters, in their order, without parameters that no
    optimizer holds or whose group keeps none. `period`: the value of the setting, for errors.
    Raises ConfigError for an optimizer whose moments are unknown, or if there are none."""
    setting, found = MOMENT_PERIODS[order], dict[int, tuple[Any, int, MomentKind]]()
    if not optimizers:
        rule = "needs the optimizer whose moments are to be averaged"
        raise ConfigError(setting, period, rule, "Give it to mend_init(optimizer=...).")
    exchanged = {id(parameter) for _, parameter in named}
    for each in optimizers:
        inner = _unwrap_optimizer(each)
        for number, group in enumerate(each.param_groups):
            held = [id(p) for p in group["params"] if id(p) in exchanged]
            if not held:
                continue
            for kind in _kinds(inner, setting, period):
                if kind.order == order and kind.beta(group) > 0:
                    found |= dict.fromkeys(held, (inner, number, kind))
    moments = [Moment(name, p, *found[id(p)]) for name, p in named if id(p) in found]
    if not moments:
        inners = [_unwrap_optimizer(each) for each in optimizers]
        kinds = ", ".join(type(inner).__name__ for inner in inners)
        known = [kind for inner in inners for kind in _kinds(inner, setting, period)]
        if unused := [kind.state for kind in known if kind.order == order]:
            beta = "momentum" if "momentum_buffer" in unused else "betas"
            rule = f"{kinds} as configured here keeps no {ORDERS[order]} moments ({beta}=0?)"
            remedy = f"Set the optimizer's {beta}, or leave it out."
            raise ConfigError(setting, period, rule, remedy)
        rule = f"{kinds} keeps no {ORDERS[order]} moments"
        raise ConfigError(setting, period, rule, "Leave it out.")
    return moments


def _kinds(optimizer: object, setting: str, period: int) -> tuple[MomentKind, ...]:
    for base in type(optimizer).__mro__:
        if base.__name__ in KINDS and hasattr(optimizer, "state"):
            return KINDS[base.__name__]
    rule = f"mend does not know which states of {type(optimizer).__name__} are moments"
    raise ConfigError(setting, period, rule, f"It knows {', '.join(KINDS)}; leave it out.")


def _unwrap_optimizer(optimizer: object) -> object:
    """torch's own optimizer, without wrappers such as Accelerate's."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


class MomentsView(FragmentView):
    """A fragment of moments. A moment that the optimizer has not created yet reads as zeros and is
    not written."""

    def __init__(
        self,
        layout: Layout,
        moments: Sequence[Averaged],
        check: Callable[[], None] = lambda: None,
        rows: Mapping[str, Rows] = NO_ROWS,
    ) -> None:
        self.moments = tuple(moments)
        super().__init__(layout, [each.parameter for each in moments], check, rows)

    def held(self) -> list[Tensor]:
        found = ((each.live(), each.parameter) for each in self.moments)
        return self._of_part(
            [torch.zeros_like(local_of(p)) if has is None else has for has, p in found]
        )

    def _names(self) -> list[str]:
        return [each.name for each in self.moments]

    def repair(self) -> list[str]:
        """Before a read, replace values that are not finite and that training cannot repair.
        Returns the names of what was replaced."""
        return []

    def captured(self) -> None:
        """Record that a capture was read."""

    def left(self, steps: int) -> list[float | None]:
        """Fraction of each element that is left after `steps`; None: it does not change."""
        return [each.beta**steps for each in self.moments]

    @torch.no_grad()
    def decay(
        self, owned: Owned, live_N: Tensor, captured_N: Tensor, mean_N: Tensor, steps: int
    ) -> None:
        """`live_N` becomes the moments that the racks' mean would be by now, `steps` after it was
        captured: beta^steps mean + (live - beta^steps captured), and no second moment below 0. All
        fp32, N. With 0 steps live is captured, and becomes the mean to the bit."""
        rows = zip(pairwise(owned.cuts), self.moments, self.left(steps), strict=True)
        for (start, stop), moment, left in rows:
            if left is None:
                continue
            live_n = live_N[start:stop]
            live_n.sub_(captured_N[start:stop] * left).add_(mean_N[start:stop] * left)
            if moment.order == SECOND:
                live_n.clamp_(min=0)
