"""The calls of a loop that was written for tsugi-mend."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from mend import api
from mend.config import MendConfig

__all__ = ["Runtime", "get_runtime", "mend_init", "mend_shutdown"]


class Runtime:
    """mend's Runtime, with the calls that have nothing to do."""

    def __init__(self, runtime: api.Runtime, *, steps_by_hand: bool) -> None:
        self._runtime, self._steps_by_hand = runtime, steps_by_hand
        self._warned = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def step_begin(self, step: int) -> None:
        """Nothing is due before a step."""

    def step_end(self, step: int, step_time_ms_override: float | None = None) -> None:
        """One step is done, unless an optimizer given to mend_init has counted it already. mend
        counts and times steps itself: the arguments are not used."""
        if self._steps_by_hand:
            self._runtime.step()

    def outer_step_begin(self, round_id: int, fragment_provider: Any = None) -> None:
        """Nothing: mend captures and exchanges by itself. The provider is not called; a warning
        says so once."""
        if fragment_provider is not None and not self._warned:
            self._warned = True
            warnings.warn(
                "outer_step_begin: mend reads the fragments from the model itself; "
                "fragment_provider is not called. Both outer_step lines can be removed.",
                stacklevel=2,
            )

    def outer_step_collect(self) -> None:
        """None: mend has applied what was merged."""


_runtimes: WeakKeyDictionary[api.Runtime, Runtime] = WeakKeyDictionary()


def mend_init(
    model: nn.Module,
    config: MendConfig,
    rank_id: str | None = None,
    optimizer: api.Optimizers | None = None,
) -> None:
    """As `mend.mend_init`. `rank_id`: a label, which mend does not need: racks have numbers
    (MEND_RACK). `optimizer`: where moments are exchanged. Raises what `mend.mend_init` raises."""
    runtime = api.mend_init(model, config, optimizer)
    _runtimes[runtime] = Runtime(runtime, steps_by_hand=optimizer is None)


def mend_shutdown(model: nn.Module) -> None:
    """As `mend.mend_shutdown`; get_runtime(model).status() before it has the last figures."""
    api.mend_shutdown(model)


def get_runtime(model: nn.Module) -> Runtime:
    """The runtime of this model. Raises UsageError without one."""
    runtime = api.get_runtime(model)
    return _runtimes.setdefault(runtime, Runtime(runtime, steps_by_hand=False))
