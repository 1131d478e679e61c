"""Writes versions as files. A file exists with all its bytes, or not at all."""

from __future__ import annotations

import contextlib
import os
from math import prod
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from mend.engine.checkpoint.checkpoint_files import sync_folder
from mend.engine.compute.safetensors import LENGTH_BYTES, Entry, head_of, length_in, read_head
from mend.engine.joining.plain_data import DTYPES
from mend.errors import CheckpointError, ConfigError, UsageError
from mend.following.follower import Version

PATTERN = "version-*.safetensors"
_TYPES = {DTYPES[name]: name for name in ("F64", "F32", "F16", "BF16")}


class About(msgspec.Struct, frozen=True):
    """The metadata of a version in a file, as JSON under the key `mend`; see `Version`."""

    job: str
    number: int
    versions: tuple[int, ...]
    digest: str
    step: int


class VersionFiles:
    """The newest `keep` versions of each job in a folder. Raises ConfigError for a folder that
    cannot be made."""

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
        then the folder is unchanged. A reader finds only whole files."""
        path = self.folder / f"version-{version.number:08d}-{version.digest[:8]}.safetensors"
        part = path.with_name(f".{path.name}.part")
        about = About(version.job, version.number, version.versions, version.digest, version.step)
        try:
            _write(part, about, version)
            os.replace(part, path)
            sync_folder(self.folder)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        self._prune(path, version.job)
        return path

    def _prune(self, newest: Path, job: str) -> None:
        """Remove the oldest files of this job by age, not by number: a job that has returned to an
        older version writes lower numbers."""
        others = [each for each in self.folder.glob(PATTERN) if each != newest]
        others = [each for each in others if _job_of(each) == job]
        others.sort(key=lambda each: (each.stat().st_mtime_ns, each.name), reverse=True)
        for old in others[self.keep - 1 :]:
            old.unlink(missing_ok=True)


def newest_version(folder: Path) -> Path:
    """The newest file of `VersionFiles` in a folder. Raises CheckpointError if there is none."""
    found = [(path.stat().st_mtime_ns, path) for path in folder.glob(PATTERN)]
    if not found:
        raise CheckpointError(f"{folder} holds no version yet; run `mend follow --to {folder}`")
    return max(found)[1]


def read_version(path: Path) -> tuple[About, dict[str, Tensor]]:
    """Read a file of `VersionFiles`. Raises CheckpointError if it is damaged or not such a file,
    OSError if it cannot be read."""
    data = path.read_bytes()
    try:
        begin = LENGTH_BYTES + length_in(data)
        text, entries = read_head(data[LENGTH_BYTES:begin])
        about = msgspec.json.decode(text, type=About)
        types = {name: kind for kind, name in _TYPES.items()}
        tensors = dict[str, Tensor]()
        for name, entry in entries.items():
            dtype, numel = types[entry.dtype], prod(entry.shape)
            first, last = entry.data_offsets
            if (
                last - first != numel * dtype.itemsize
                or not 0 <= first <= last <= len(data) - begin
            ):
                raise ValueError(f"{name} does not lie in the file")
            flat = _tensor(data[begin + first : begin + last], dtype)
            tensors[name] = flat.view(entry.shape)
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a version of mend follow: {error}") from error
    return about, tensors


def _job_of(path: Path) -> str | None:
    """Return the job of a file; None: it is not a whole version, or it is gone."""
    try:
        with path.open("rb") as file:
            length = length_in(file.read(LENGTH_BYTES))
            if length > os.fstat(file.fileno()).st_size:
                return None
            text, _ = read_head(file.read(length))
        return msgspec.json.decode(text, type=About).job
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return None


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


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _type(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _TYPES:
        raise UsageError(f"{name} is {tensor.dtype}, which a safetensors file does not hold")
    return _TYPES[tensor.dtype]
