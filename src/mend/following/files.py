"""Versions as files: each is there with all its bytes, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from mend.engine.safetensors import Entry, head_of
from mend.errors import ConfigError, UsageError
from mend.following.follower import Version

PATTERN = "version-*.safetensors"
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class About(msgspec.Struct, frozen=True):
    """What a file says of its version, as JSON in the metadata under `mend`; see `Version`."""

    job: str
    number: int
    versions: tuple[int, ...]
    digest: str
    step: int


class VersionFiles:
    """The newest `keep` versions in a folder. Raises ConfigError for a folder that cannot be
    made."""

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise ConfigError("keep", keep, "must be at least 1", "Keep one file.")
        self.folder, self.keep = folder, keep
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"cannot be made ({error.strerror})"
            raise ConfigError("folder", str(folder), rule, "Name one that you may write.") from None

    def write(self, version: Version) -> Path:
        """Write a version, synced, under its number, and remove the oldest. Raises OSError, and
        then the folder is as it was: a reader finds whole files only."""
        path = self.folder / f"version-{version.number:08d}-{version.digest[:8]}.safetensors"
        part = path.with_name(f".{path.name}.part")
        about = About(version.job, version.number, version.versions, version.digest, version.step)
        try:
            _write(part, about, version)
            os.replace(part, path)
            _sync_folder(self.folder)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        self._prune(path)
        return path

    def _prune(self, newest: Path) -> None:
        """By age, as a job that has gone back to an older version writes lower numbers."""
        others = [each for each in self.folder.glob(PATTERN) if each != newest]
        others.sort(key=lambda each: (each.stat().st_mtime_ns, each.name), reverse=True)
        for old in others[self.keep - 1 :]:
            old.unlink(missing_ok=True)


def _write(path: Path, about: About, version: Version) -> None:
    entries, end = dict[str, Entry](), 0
    for name, tensor in version.tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = Entry(_type(name, tensor), tuple(tensor.shape), (begin, end))
    with path.open("wb") as file:
        file.write(head_of(about, entries))
        for tensor in version.tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _type(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _TYPES:
        raise UsageError(f"{name} is {tensor.dtype}, which a safetensors file does not hold")
    return _TYPES[tensor.dtype]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
