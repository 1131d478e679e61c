"""Feeds the files of `mend follow` to inference workers, by the five calls of vLLM's
WeightTransferEngine (init_transfer_engine, start_weight_update, receive_weights,
finish_weight_update, shutdown). It imports nothing of vLLM.

One `mend follow` per cluster pulls a version; all workers load the same file. The driver pauses
generation, has every worker do start, receive, finish, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from mend.errors import UsageError
from mend.following.files import About, newest_version, read_version


class Loads(Protocol):
    """A model of vLLM: it takes weights under the names of a checkpoint, and shards them itself."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object: ...


@dataclass
class InitInfo:
    """`folder`: the one of `mend follow --to`."""

    folder: str


@dataclass
class UpdateInfo:
    """`file`: name of the version in the folder, equal for all workers; empty: the newest, if there
    is only one worker."""

    file: str = ""


class MendWeightTransferEngine:
    """Of one worker. `model`: what gets the weights; it must be the model that the racks train,
    under the same names.

    To use it in vLLM, derive a class from this one and vLLM's WeightTransferEngine, and register it
    with WeightTransferEngineFactory.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    model: Loads
    _folder: Path | None = None
    _updating = _received = False
    loaded: About | None = None
    """The version that the model holds; None: the weights that it began with."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._folder = Path(init_info.folder)

    def start_weight_update(self) -> None:
        """Begin an update. The model must not be used from here on."""
        self._updating, self._received = True, False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a version. The file is read and checked before the model is changed. Raises
        UsageError if called out of order, CheckpointError for a damaged file."""
        if self._folder is None or not self._updating:
            raise UsageError("receive_weights before init_transfer_engine and start_weight_update")
        name = update_info.file
        if Path(name).name != name:
            raise UsageError(f"{name!r} is not the name of a file in {self._folder}")
        about, tensors = read_version(self._folder / name if name else newest_version(self._folder))
        self.loaded, self._received = None, False  # until all of it is loaded
        self.model.load_weights(tensors.items())
        self.loaded, self._received = about, True

    def finish_weight_update(self) -> None:
        """End the update; the model may be used again. Raises UsageError if it holds a part of a
        version, or no version was loaded in this update."""
        if not self._received:
            raise UsageError("no version was loaded since start_weight_update; load one first")
        self._updating = False

    def shutdown(self) -> None:
        self._folder, self._updating = None, False

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Raises UsageError: racks do not send, `mend follow` pulls."""
        raise UsageError("mend's racks do not send weights; run `mend follow --to FOLDER`")
