"""mend's state inside a checkpoint of torch.distributed.checkpoint (DCP).

A rank's state is a flat dict of tensors under a name of its own, so that DCP takes no tensor for a
replica of another rank's. Everything else is JSON in a tensor of bytes: mend unpickles nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from mend.consensus.records import CheckpointRecord
from mend.engine.checkpoint.checkpoint import (
    Facts,
    RackCheckpoint,
    Taken,
    differing_fact,
    manifest_of,
    remedy_of_plan,
    state_of,
)
from mend.engine.checkpoint.checkpoint_files import Manifest, State, refuse_format
from mend.engine.compute.digest import bytes_of, digest_of_state
from mend.engine.io.rack import RackGroup
from mend.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

_ABOUT, _REGISTERED = "about", "registered"


class _About(msgspec.Struct, frozen=True):
    """`sums`: xxh3_128 of the tensors that have no digest in `state`."""

    manifest: Manifest
    state: State
    sums: dict[str, str]


def saved_state(
    group: RackGroup, rack: int, facts: Facts, mark: CheckpointRecord, taken: Taken
) -> dict[str, dict[str, Tensor]]:
    """The state of one rank, for DCP. All ranks of the rack call it together. The result shares
    memory with `taken`."""
    tensors = dict(taken.tensors)
    if taken.registered is not None:
        tensors[_REGISTERED] = taken.registered
    manifest = manifest_of(group, rack, facts, mark, taken, files=())
    about = _About(manifest, state_of(taken), _sums(tensors))
    text = bytearray(msgspec.json.encode(about))
    return {_name(rack, group.rank): {_ABOUT: torch.frombuffer(text, dtype=torch.uint8), **tensors}}


def _name(rack: int, rank: int) -> str:
    return f"rack-{rack}-rank-{rank}"


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: digest_of_state(each.view(torch.uint8))
        for name, each in tensors.items() if not name.endswith(".anchor")
    }  # fmt: skip


class SavedState:
    """mend's part of a DCP checkpoint, for `mend_init(resume=)`.

    Give it to `torch.distributed.checkpoint.load` with what else is loaded, under the key that the
    runtime was saved under; then to mend_init. `checkpoint`: its folder, or a StorageReader.
    `rank`: this process's in its rack; None: that in the process group.

    Raises CheckpointError where the checkpoint has nothing of this rank, UsageError for what is
    neither a folder nor a reader.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | StorageReader,
        key: str = "mend",
        *,
        rank: int | None = None,
    ) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if isinstance(checkpoint, str | os.PathLike):
            self._where, checkpoint = f"{checkpoint}", FileSystemReader(checkpoint)
        elif hasattr(checkpoint, "read_metadata"):
            self._where = type(checkpoint).__name__
        else:
            raise UsageError(
                f"checkpoint is {_type_of(checkpoint)}; it takes the folder of a checkpoint of "
                "torch.distributed.checkpoint (str or Path), or a StorageReader"
            )
        try:
            listed: dict[str, Any] = dict(checkpoint.read_metadata().state_dict_metadata)
        except OSError as error:
            raise CheckpointError(
                f"there is no DCP checkpoint in {self._where}: {error}"
            ) from error
        split = {
            name: name.removeprefix(f"{key}.").split(".", 1)
            for name in listed if name.startswith(f"{key}.rack-")
        }  # fmt: skip
        saved = sorted({who for who, _ in split.values()})
        mine = [who for who in saved if who.endswith(f"-rank-{rank}")]
        if len(mine) != 1:
            has = f"it has {', '.join(saved)}" if saved else f"it has nothing under {key!r}"
            raise CheckpointError(
                f"{self._where} is not of rank {rank} of one rack of mend: {has}. Save one DCP "
                "checkpoint per rack, and go on with as many ranks"
            )
        self._who = mine[0]
        self._template: dict[str, Tensor] = {
            part: torch.empty(listed[name].size, dtype=listed[name].properties.dtype, device="cpu")
            for name, (who, part) in split.items() if who == self._who
        }  # fmt: skip
        self._loaded: tuple[_About, dict[str, Tensor]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What `torch.distributed.checkpoint.load` fills."""
        return {self._who: self._template}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the filled state; `torch.distributed.checkpoint.load` calls this. Raises
        CheckpointError for a state that is not as it was saved."""
        tensors: dict[str, Tensor] = dict(state_dict[self._who])
        try:
            text = bytes(bytes_of(tensors.pop(_ABOUT)))
            about = msgspec.json.decode(text, type=_About)
        except (KeyError, msgspec.DecodeError, ValueError) as error:
            raise CheckpointError(f"{self._where}: {self._who} is damaged: {error!r}") from error
        refuse_format(self._where, about.manifest)
        sums = _sums(tensors)
        for name in sorted(sums.keys() | about.sums.keys()):
            if sums.get(name) != about.sums.get(name):
                raise CheckpointError(f"{self._where}: {name} of {self._who} is damaged")
        self._loaded = about, tensors

    def part(self, rack: int, rank: int, facts: Facts) -> RackCheckpoint:
        """The checkpoint of this rank, for `mend_init`. Raises CheckpointError where nothing was
        loaded, or it is of another rank or plan."""
        if self._loaded is None:
            raise CheckpointError(
                f"the SavedState of {self._where} was not loaded: call "
                'torch.distributed.checkpoint.load({"mend": saved, ...}) before mend_init'
            )
        about, tensors = self._loaded[0], dict(self._loaded[1])
        if self._who != _name(rack, rank):
            raise CheckpointError(
                f"{self._where} is of {self._who}, this is {_name(rack, rank)}: give each rack its "
                "own checkpoint"
            )
        if why := differing_fact(about.manifest.facts, facts):
            ranks = int(dict(facts).get("ranks per rack", 0))
            more = remedy_of_plan(about.manifest, ranks)
            raise CheckpointError(f"{self._where} is of another plan: {why}{more}")
        registered = tensors.pop(_REGISTERED, None)
        return RackCheckpoint(Path(self._where), about.manifest, about.state, tensors, registered)


def source_of(resume: object) -> Path | SavedState | None:
    """What `mend_init(resume=)` goes on from. Raises UsageError for a value of another type."""
    if resume is None or isinstance(resume, SavedState):
        return resume
    if isinstance(resume, str | os.PathLike) and isinstance(path := os.fspath(resume), str):
        if not path:
            raise UsageError("resume is ''; name a folder, or leave it out for a new job")
        return Path(path)
    raise UsageError(
        f"resume is {_type_of(resume)}; it takes a folder of runtime.checkpoint (str or Path), or "
        "a mend.SavedState that torch.distributed.checkpoint has loaded"
    )


def _type_of(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
