"""mend in the place of Accelerate's `LocalSGD`: the same arguments and the same loop.

    from mend.integrations.accelerate import LocalSGD

    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=128) as local_sgd:
        for batch in loader:
            ...
            optimizer.step()
            local_sgd.step()
    # here the model holds the merged weights

Accelerate's averages the ranks of one process group, and waits for it; this one leaves the ranks of
a rack as they are and exchanges with other racks while they train.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from torch import nn

from mend.api import Runtime, session
from mend.config import MendConfig
from mend.integrations.membership import config_of_rack
from mend.status.status import Status


class LocalSGD:
    """`local_sgd_steps`: H, the steps between two exchanges of a parameter. `enabled` False: do
    nothing. `config`: replaces `local_sgd_steps`. `options`: further arguments of `mend.session`,
    such as `optimizer` (its state is then sent to racks that join) and `resume`.

    Raises what `mend.session` raises, and ConfigError if one torchrun spans several racks.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        *,
        config: MendConfig | None = None,
        **options: Any,
    ) -> None:
        self.enabled = enabled
        self.runtime: Runtime | None = None
        self.status: Status | None = None
        """The last status, after the end."""
        self._undo = contextlib.ExitStack()
        if enabled:
            config = config_of_rack(config or MendConfig(sync_period_steps=local_sgd_steps))
            self._session = session(accelerator.unwrap_model(model), config, **options)

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self.runtime = self._undo.enter_context(self._session)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._undo.__exit__(kind, error, traceback)
        finally:
            if self.runtime is not None:
                self.status = self.runtime.status()

    def step(self) -> None:
        """Does nothing: mend has counted the optimizer's step."""
