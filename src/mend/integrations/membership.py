"""What all integrations have in common: they join the job, checkpoint beside the framework's files,
and leave."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mend.api import Runtime, mend_init, mend_shutdown
from mend.config import MendConfig
from mend.errors import CheckpointError, ConfigError
from mend.status.status import Status


def name_at(step: int) -> str:
    """Name of the folder with the job's state at a step. Racks recognize a common checkpoint by
    it."""
    return f"mend-step-{step}"


def config_of_rack(config: MendConfig) -> MendConfig:
    """`config`, unchanged. Raises ConfigError if one torchrun spans several racks, because the
    framework would wrap the model for all of its ranks."""
    if config.rack_aware:
        raise ConfigError(
            "rack_aware", True,
            rule="a framework's loop needs a process group of one rack",
            remedy="start one torchrun per rack, and leave MEND_RACK_AWARE out",
        )  # fmt: skip
    return config


class Membership:
    """This rack's place in a job, from the first step of a training to its last.

    `config`: None: from MEND_* variables. `options`: further arguments of `mend_init`.
    `checkpoints`: put the job's state into those of the framework.
    Raises ConfigError.
    """

    def __init__(
        self, config: MendConfig | None, options: dict[str, Any], checkpoints: bool = True
    ) -> None:
        self.config = config_of_rack(config if config is not None else MendConfig())
        self.options, self.checkpoints = options, checkpoints
        self.runtime: Runtime | None = None
        """Set while this rack trains."""
        self.status: Status | None = None
        """The last status, after the end."""

    @property
    def exchanges(self) -> bool:
        return self.config.exchange and self.config.racks > 1

    def folder_in(self, path: str | Path) -> Path:
        """A folder of this rack for the files of its framework: racks may share a file system, and
        frameworks name their files by the step only."""
        name = f"rack-{self.config.rack_number}"
        return Path(path) if Path(path).name == name else Path(path) / name

    def begin(self, model: nn.Module, optimizers: Sequence[Any], resume: Path | None) -> Runtime:
        """Join the job. `resume`: the folder with the job's state that belongs to the framework's
        checkpoint; None: the model was not loaded from one. If the folder is missing, a new job
        begins with the weights of rack 0."""
        if resume is not None and not resume.is_dir():
            warnings.warn(
                f"the checkpoint has no state of a job of mend ({resume} is missing): a new job "
                "begins, with the weights of rack 0. Begin all racks from the same checkpoint",
                stacklevel=3,
            )
            resume = None
        self.abort()  # of a training that an exception has ended
        self.status = None
        self.runtime = mend_init(model, self.config, optimizers, resume=resume, **self.options)
        return self.runtime

    def checkpoint(self, folder: Path) -> None:
        """Write the job's state into `folder`, directly before the framework saves the model. Waits
        until all racks have reached their own folder of this name. If they do not, training
        continues with a warning, and the framework's checkpoint has no state of the job."""
        if self.runtime is None or not (self.exchanges and self.checkpoints):
            return
        try:
            self.runtime.checkpoint(folder, _write_nothing)
        except CheckpointError as error:
            warnings.warn(f"{folder} gets no state of the job: {error}", stacklevel=3)

    def end(self, model: nn.Module) -> None:
        """Merge open work and leave; the model then holds the merged weights. Idempotent."""
        if self.runtime is not None:
            self.runtime, self.status = None, mend_shutdown(model)

    def abort(self) -> None:
        """Leave at once; the model keeps its own weights. Idempotent."""
        if self.runtime is not None:
            runtime, self.runtime = self.runtime, None
            runtime.abort()
            self.status = runtime.status()


class Member:
    """Base of the callbacks of frameworks: gives access to the job."""

    _member: Membership | None = None

    @property
    def runtime(self) -> Runtime | None:
        """The runtime of the job, while this rack trains."""
        return self._member.runtime if self._member else None

    @property
    def status(self) -> Status | None:
        """The last status, after the end: `status.outcome` says whether all work was merged."""
        return self._member.status if self._member else None


def _write_nothing(folder: Path) -> None:
    """Write the job's state. The framework saves the model in `folder`'s parent directly after the
    call that leads here."""
