"""The files of a checkpoint. They are written under a temporary name, synced, then renamed; and
read with bounds and checksums, never unpickled.

    FOLDER/rack-0/rank-0.safetensors    tensors of a rank, and its progress as JSON
                  registered-0.safetensors    what it has registered (register_state)
                  ...                   whatever the script saves beside them
                  manifest.json         what it is of, and every file with size and sha256
                  COMPLETE              sha256 of the manifest: all racks have written their part
           rack-1/...
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from mend.consensus.records import Units
from mend.engine.compute.digest import bytes_of
from mend.engine.compute.safetensors import LENGTH_BYTES, Entry, head_of, length_in, read_head
from mend.engine.state.fragment_state import OfferProgress, RankProgress
from mend.errors import CheckpointError

FORMAT = 2
"""1: the facts had other names, and those that a resumed job may change were among them."""
HEADER_BYTES_MAX = 16 << 20
MANIFEST_BYTES_MAX = 256 << 20
FILES_MAX = 100_000
_READ_BYTES = 4 << 20

MANIFEST, COMPLETE = "manifest.json", "COMPLETE"
_TYPE = "F32"


class File(msgspec.Struct, frozen=True):
    """A file of a rack's part. `name` is relative to the rack's folder."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of one rack's part."""

    format: int = FORMAT
    mend: str
    name: str
    lineage: str
    number: int
    """Number in this lineage; the two together identify the checkpoint."""
    racks: tuple[int, ...]
    rack: int
    ranks: int
    wall_ns: int
    step: int
    open_tokens: float
    """Tokens that this rack trained and nobody merged, summed over ranks and averaged over
    fragments, as in the ledger."""
    versions: tuple[int, ...]
    rounds: tuple[int, ...]
    digests: tuple[tuple[str, ...], ...]
    """Per fragment and rank."""
    facts: tuple[tuple[str, str], ...]
    """Facts of the plan, which must be equal in a job that resumes the checkpoint."""
    files: tuple[File, ...]
    units: Units | None = None
    """Units of data at the record of the checkpoint, in a job that gives them out."""

    @property
    def key(self) -> tuple[str, int]:
        return self.lineage, self.number


class State(msgspec.Struct, frozen=True):
    """The part of a rank's file that is not tensors."""

    progress: RankProgress
    offers: tuple[OfferProgress, ...]


def rack_folder(folder: Path, rack: int) -> Path:
    return folder / f"rack-{rack}"


def rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def registered_file(rank: int) -> str:
    return f"registered-{rank}.safetensors"


# ------------------------------------------------------------------ writing


def write_rank(path: Path, state: State, tensors: Mapping[str, Tensor]) -> None:
    """Write a rank's file in the format of the safetensors library. `tensors`: fp32 vectors."""
    entries, end = dict[str, Entry](), 0
    for name, values_N in tensors.items():
        begin, end = end, end + 4 * values_N.numel()
        entries[name] = Entry(_TYPE, (values_N.numel(),), (begin, end))
    with path.open("wb") as file:
        file.write(head_of(state, entries))
        for values_N in tensors.values():
            file.write(bytes_of(values_N))
        file.flush()
        os.fsync(file.fileno())


def refuse_taken_names(part: Path, ranks: int) -> None:
    """Raise CheckpointError if the script has saved a file under a name that mend uses: the file
    would be overwritten, or would not be the one that the manifest describes."""
    own = [f(rank) for rank in range(ranks) for f in (rank_file, registered_file)]
    for name in (*own, MANIFEST, COMPLETE):
        if os.path.lexists(part / name):
            raise CheckpointError(
                f"the script has saved {name!r}, which mend writes itself: give that file another "
                "name, or a folder of its own"
            )


def files_in(folder: Path) -> list[str]:
    """Names of all files in the folder and its subfolders, sorted. Raises CheckpointError for
    anything but plain files, and for too many."""
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is not a plain file; save plain files into a checkpoint")
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    if len(names) > FILES_MAX:
        raise CheckpointError(f"{len(names)} files in {folder}; at most {FILES_MAX}")
    return names


def summed(folder: Path, names: Sequence[str], *, sync: bool = False) -> list[File]:
    """Sizes and checksums of these files. `sync`: also fsync them."""
    files = []
    for name in names:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            files.append(File(name, file.tell(), digest))
            if sync:
                os.fsync(file.fileno())
    return files


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write a file atomically: after a crash it exists with all its bytes, or not at all."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_part(part: Path) -> None:
    """Make the temporary folder for a rack's files, empty. Raises CheckpointError where there is a
    complete checkpoint already, or the folder cannot be made."""
    folder = part.parent
    if complete := sorted(folder.glob(f"rack-*/{COMPLETE}")):
        raise CheckpointError(
            f"{folder} holds a complete checkpoint ({complete[0].parent.name}); give this one "
            "another name, or remove it"
        )
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"folder={str(folder)!r}: cannot be made ({error.strerror}). Give checkpoint() a "
            "folder that this process may make and write"
        ) from error


def end_part(part: Path, manifest: Manifest) -> None:
    """Write the manifest after all other files, and rename the folder to its final name."""
    write_whole(part / MANIFEST, msgspec.json.encode(manifest))
    for folder in sorted(path for path in part.rglob("*") if path.is_dir()):
        sync_folder(folder)
    final = rack_folder(part.parent, manifest.rack)
    shutil.rmtree(final, ignore_errors=True)  # of a job that ended before this was complete
    part.rename(final)
    sync_folder(part.parent)


def complete_part(folder: Path, rack: int) -> None:
    """Mark a rack's part as complete: all racks have written theirs."""
    part = rack_folder(folder, rack)
    digest = hashlib.sha256((part / MANIFEST).read_bytes()).hexdigest()
    write_whole(part / COMPLETE, digest.encode())


# ------------------------------------------------------------------ reading


def newest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints; None if there is none. Those of
    one lineage are compared by number, so that a clock that is set back hides none of them, and
    lineages by the clock of the process that wrote their newest one. Incomplete ones are skipped.
    Raises CheckpointError for a damaged manifest."""
    newest = dict[str, tuple[Manifest, Path]]()
    for path in sorted(Path(folder).glob("*")):
        if not path.is_dir() or (manifest := complete_manifest(path)) is None:
            continue
        known = newest.get(manifest.lineage)
        if known is None or _order_of(known[0]) <= _order_of(manifest):
            newest[manifest.lineage] = manifest, path
    return max(((m.wall_ns, path) for m, path in newest.values()), default=(0, None))[1]


def _order_of(manifest: Manifest) -> tuple[int, int]:
    """Orders manifests of one lineage; the newest is the largest."""
    return manifest.number, manifest.wall_ns


def complete_manifest(folder: Path) -> Manifest | None:
    """The manifest of a rack whose part is marked complete; None: there is none. Raises
    CheckpointError if it is damaged."""
    for marker in sorted(folder.glob(f"rack-*/{COMPLETE}")):
        data = _bytes(marker.parent / MANIFEST, MANIFEST_BYTES_MAX)
        if marker.read_bytes()[:64] == hashlib.sha256(data).hexdigest().encode():
            return _manifest(marker.parent / MANIFEST, data)
        raise CheckpointError(f"{marker.parent / MANIFEST} is damaged: not the sha256 of {marker}")
    return None


def read_manifest(folder: Path, rack: int) -> Manifest | None:
    """The manifest of a rack's part; None: the rack has no part. Raises CheckpointError where no
    checkpoint is complete, or parts of several are."""
    complete = complete_manifest(folder)
    if complete is None:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint; give the path of one, or what "
            "mend.newest_checkpoint finds"
        )
    path = rack_folder(folder, rack) / MANIFEST
    if not path.exists():
        return None
    own = _manifest(path, _bytes(path, MANIFEST_BYTES_MAX))
    if own.key != complete.key and (path.parent / COMPLETE).exists():
        parts = sorted((own, complete), key=lambda part: part.wall_ns)
        older, newer = (f"rack-{part.rack} of step {part.step}" for part in parts)
        raise CheckpointError(
            f"{folder} holds complete parts of two checkpoints: {newer}, and the older {older}. "
            "Put parts of one checkpoint there, or resume another one"
        )
    if own.key != complete.key:
        return None  # left by another job that did not complete it
    if own.rack != rack or (own.racks, own.versions) != (complete.racks, complete.versions):
        raise CheckpointError(f"{path} is not of the same checkpoint as the others in {folder}")
    return own


def _manifest(path: Path, data: bytes) -> Manifest:
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    for name in (file.name for file in manifest.files):
        if ".." in name.split("/") or name[:1] in ("", "/"):
            raise CheckpointError(f"{path} is damaged: it names the file {name!r}")
    refuse_format(path, manifest)
    return manifest


def refuse_format(where: object, manifest: Manifest) -> None:
    """Raise CheckpointError for a checkpoint of another format."""
    if manifest.format != FORMAT:
        raise CheckpointError(f"{where} has format {manifest.format}, this mend reads {FORMAT}")


def check_files(folder: Path, manifest: Manifest, rank: int, ranks: int) -> None:
    """Compare this rank's share of the files with the manifest. The checksums of rank files are
    verified by `read_rank`. Raises CheckpointError."""
    read = {rank_file(each) for each in range(manifest.ranks)}
    for file in manifest.files[rank::ranks]:
        path = folder / file.name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, which {folder / MANIFEST} names")
        if (size := path.stat().st_size) != file.size:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes of {file.size}")
        if file.name not in read and summed(folder, [file.name]) != [file]:
            raise CheckpointError(f"{path} is damaged: its sha256 is not that of the manifest")


def read_rank(folder: Path, manifest: Manifest, rank: int) -> tuple[State, dict[str, Tensor]]:
    """Read a rank's state and tensors, and verify the checksum. Raises CheckpointError."""
    path, files = folder / rank_file(rank), {file.name: file for file in manifest.files}
    known = files.get(path.name)
    if known is None or not path.is_file() or path.stat().st_size != known.size:
        raise CheckpointError(f"{path} is missing or truncated")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        head = _head(path, file, digest)
        state, entries = _state(path, head)
        tensors = {}
        for name, numel in _numels(path, entries, known.size - LENGTH_BYTES - len(head)):
            tensors[name] = torch.empty(numel, dtype=torch.float32, device="cpu")
            into = tensors[name].view(torch.uint8).numpy().data
            for start in range(0, len(into), _READ_BYTES):
                piece = into[start : start + _READ_BYTES]
                if file.readinto(piece) != len(piece):
                    raise CheckpointError(f"{path} is truncated")
                digest.update(piece)
    if digest.hexdigest() != known.sha256:
        raise CheckpointError(f"{path} is damaged: its sha256 is not that of the manifest")
    return state, tensors


def _head(path: Path, file: BinaryIO, digest: hashlib._Hash) -> bytes:
    first = file.read(LENGTH_BYTES)
    size = length_in(first)
    if len(first) < LENGTH_BYTES or size > HEADER_BYTES_MAX:
        raise CheckpointError(f"{path} is damaged: a header of {size} bytes")
    head = file.read(size)
    digest.update(first + head)
    return head


def _state(path: Path, head: bytes) -> tuple[State, dict[str, Entry]]:
    try:
        about, entries = read_head(head)
        state = msgspec.json.decode(about, type=State)
    except (msgspec.DecodeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return state, entries


def _numels(path: Path, entries: Mapping[str, Entry], size: int) -> Iterator[tuple[str, int]]:
    """(name, elements) in the order of the file, which they must fill without a gap."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        numel = math.prod(entry.shape)
        fits = begin == end <= stop <= size and stop - begin == 4 * numel
        if entry.dtype != _TYPE or not fits:
            raise CheckpointError(f"{path} is damaged: {name} is {entry}")
        yield name, numel
        end = stop
    if end != size:
        raise CheckpointError(f"{path} is damaged: {size - end} bytes of no tensor")


def _bytes(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise CheckpointError(f"{path} has more than {limit} bytes")
    return data
