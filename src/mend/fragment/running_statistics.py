"""Running statistics: the means and variances that BatchNorm and similar layers keep of their
inputs. Reads and writes buffers of modules; uses no peers, clocks or files.

A running statistic is an exponential moving average, like a moment of an optimizer, and racks
average it in the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mend.errors import UsageError
from mend.fragment.moments import FIRST, SECOND, MomentsView
from mend.fragment.plan import cut_layouts
from mend.fragment.stages import Elsewhere
from mend.types import Layout, Owned

_ORDERS = {"running_mean": FIRST, "running_var": SECOND}


class Statistic(NamedTuple):
    """One running statistic of a module. `name`: that of its buffer in the state dict."""

    name: str
    module: weakref.ref[_NormBase]
    attribute: str
    first: Tensor
    """The buffer as it was at mend_init."""

    @property
    def parameter(self) -> Tensor:
        """A tensor of its shape, type and device."""
        return self.first

    @property
    def order(self) -> int:
        return _ORDERS[self.attribute]

    def live(self) -> Tensor:
        """The buffer that the module trains. Raises UsageError when it is of another shape or type
        than at mend_init."""
        module = self.module()
        now = self.first if module is None else module._buffers.get(self.attribute)
        if now is None or (now.shape, now.dtype) != (self.first.shape, self.first.dtype):
            raise UsageError(
                f"buffer {self.name} was {_kind(self.first)} at mend_init and is {_kind(now)}; "
                "convert the model before mend_init, on every rack, or set exchange_statistics="
                "False there"
            )
        return now.detach()

    @property
    def beta(self) -> float:
        """Fraction of it that is left after a forward pass. A cumulative average (`momentum=None`)
        is never forgotten."""
        module = self.module()
        momentum = module.momentum if module is not None else None
        return 1.0 if momentum is None else 1.0 - momentum

    def passes(self) -> Tensor | None:
        """Forward passes that it has averaged. Some modules have no counter (None), or never count
        with it (InstanceNorm)."""
        module = self.module()
        return module.num_batches_tracked if module is not None else None


def _kind(buffer: Tensor | None) -> str:
    return "gone" if buffer is None else f"{buffer.dtype} {tuple(buffer.shape)}"


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    """All of them, end to end, on the host; with one transfer if they are on one GPU."""
    if len({each.device for each in vectors}) > 1:
        vectors = [each.cpu() for each in vectors]
    return torch.cat(list(vectors)).cpu()


def modules_with_statistics(model: nn.Module) -> Iterator[tuple[str, _NormBase]]:
    """(path, module) of the modules that keep running statistics of their input."""
    for path, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            yield path, module


def statistics_of(model: nn.Module) -> list[Statistic]:
    """The running statistics of a model, in module order."""
    return [
        Statistic(f"{path}.{name}" if path else name, weakref.ref(module), name, buffer)
        for path, module in modules_with_statistics(model)
        for name in _ORDERS
        if (buffer := module._buffers[name]) is not None and not buffer.is_meta
    ]


def plan_statistics(statistics: Sequence[tuple[str, Tensor]], fragment: int) -> Layout:
    """All of them in one fragment of this number, because they are small, each with a tensor of its
    shape."""
    (layout,) = cut_layouts(statistics, 1, fragment)
    return layout


class StatisticsView(MomentsView):
    """A fragment of running statistics.

    A frozen one, which no forward pass has moved since mend wrote it, stays as it is to the bit:
    the racks' mean of equal values may differ in the last one, as their weights are rounded.
    """

    def __init__(
        self, layout: Layout, statistics: Sequence[Statistic | Elsewhere], check: Callable[[], None]
    ) -> None:
        super().__init__(layout, statistics, check)
        self.statistics = tuple(statistics)
        self._passes = list[int | None]()
        """Forward passes at the newest capture; empty: there was none in this process."""
        self._moved = [True] * len(statistics)
        """At the newest capture: whether it had moved since the write before."""
        self._written = self._values()

    @torch.no_grad()
    def repair(self) -> list[str]:
        """Reset statistics that are not finite. One that has received Inf, as in a step that a
        GradScaler skips, stays NaN forever. It is set to what mend wrote last: the racks' last
        mean."""
        bad = []
        for each, now, written in zip(self.statistics, self._values(), self._written, strict=True):
            # A magnitude whose square is infinite in fp32 is not merged either.
            if not torch.isfinite(now.float().square()).all():
                each.live().copy_(written.view(each.first.shape))
                bad.append(each.name)
        return bad

    def captured(self) -> None:
        self._passes = self._passes_now()
        self._moved = [not each for each in self._as_written()]

    @torch.no_grad()
    def write(self, owned: Owned, values_N: Tensor) -> None:
        super().write(owned, values_N)
        self._written = self._values()

    def left(self, steps: int) -> list[float | None]:
        """As for moments, but by the forward passes since the capture, if the module counts them.
        None: it is frozen."""
        found = list[float | None]()
        then = self._passes or [None] * len(self.statistics)
        frozen = [a and not b for a, b in zip(self._as_written(), self._moved, strict=True)]
        pairs = zip(then, self._passes_now(), strict=True)
        for each, stays, (before, now) in zip(self.statistics, frozen, pairs, strict=True):
            passes = now - before if now is not None and before is not None else 0
            found.append(None if stays else each.beta ** (passes or steps))
        return found

    def _values(self) -> list[Tensor]:
        """The current values of each, on the host."""
        flat = [each.live().reshape(-1).double() for each in self.statistics]
        return list(torch.split(_joined(flat), [each.numel() for each in flat]))

    def _as_written(self) -> list[bool]:
        return [torch.equal(*pair) for pair in zip(self._values(), self._written, strict=True)]

    def _passes_now(self) -> list[int | None]:
        """Forward passes so far, by statistic."""
        counters = [each.passes() for each in self.statistics]
        counted = [counter.reshape(1) for counter in counters if counter is not None]
        numbers = iter(_joined(counted).tolist() if counted else [])
        return [None if counter is None else next(numbers) for counter in counters]
