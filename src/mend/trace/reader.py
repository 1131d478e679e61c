"""Reads and checks tape files. Trusts no length and no byte.

An incomplete tail, which a killed process or machine leaves, is cut and reported; any other damage
raises TapeError.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from mend.errors import TapeError, require
from mend.files import open_regular
from mend.trace import format as form
from mend.trace.format import Base, Entry, Gap, Head, Header, Unpacker

_NAME = re.compile(r"tape-rack(\d+)-rank(\d+)(?:-life(\d+))?(?:\.(\d+))?\.mend")


@dataclass(frozen=True)
class TapeFile:
    """One checked file of a tape. `stop`: the offset at which its complete chunks end."""

    path: Path
    stop: int
    chunks: int
    """Number of chunks; the first one has the header."""
    ended: bool


@dataclass(frozen=True)
class RecordedTape:
    """A tape whose files were checked. `entries` may be called repeatedly."""

    path: Path
    """Its first file."""
    header: Header
    """The header of the first file that still exists."""
    files: tuple[TapeFile, ...]
    lost: str
    """A sentence about a lost tail; empty: nothing is lost."""
    whole: bool
    """Whether it was closed in order."""

    @property
    def bytes(self) -> int:
        return sum(file.stop for file in self.files)

    def entries(self) -> Iterator[Entry | Gap]:
        """Read all entries, in the order in which they were handled. Raises TapeError."""
        number = 0
        for file in self.files:
            for record in _records(file):
                entry = form.read_record(record, number + 1)
                if isinstance(entry, Gap):
                    number += entry.count
                    yield entry
                elif isinstance(entry, Entry):
                    number += 1
                    yield entry


def read_tape(path: Path) -> RecordedTape:
    """`path`: any file of the tape. A cut tail is reported in `lost`; any other damage raises
    TapeError."""
    paths = _files_of(path)
    headers: list[Header] = []
    files: list[TapeFile] = []
    lost = ""
    for place, each in enumerate(paths):
        with _naming(each):
            header, file, lost = _checked(each)
            if headers and header.segment != headers[-1].segment + 1:
                raise TapeError(f"segment {header.segment} follows segment {headers[-1].segment}")
            if lost and place + 1 < len(paths):
                raise TapeError(f"{lost}, and another file follows it")
        headers.append(header)
        files.append(file)
    return RecordedTape(paths[0], headers[0], tuple(files), lost, files[-1].ended)


def part_to_replay(tape: RecordedTape) -> tuple[bytes, RecordedTape]:
    """The state of the machines where a replay can begin, and the tape from there on. The state is
    empty at the beginning of the job. Raises TapeError if no replay can begin anywhere."""
    if not tape.header.segment:
        return b"", tape
    for place, file in enumerate(tape.files):
        first = next(_records(file), b"")
        base = form.read_record(first, 1) if first else None
        if isinstance(base, Base):
            return base.state, replace(tape, files=tape.files[place:])
    raise TapeError(
        f"{tape.path}: it begins with segment {tape.header.segment}, and no file has the state of "
        "the machines that a replay would begin from. mend explain reads what is left"
    )


def tapes_in(paths: Sequence[Path]) -> list[Path]:
    """The first file of each tape; a folder stands for all tapes in it. Raises TapeError."""
    firsts: dict[tuple[Path, str], Path] = {}
    for path in paths:
        if not path.exists():
            raise TapeError(
                f"{path}: there is no such file or folder. Give the folder that the job had as "
                "diagnostics_dir (MEND_DIAGNOSTICS_DIR), or a tape in it"
            )
        try:
            inside = sorted(path.rglob("*.mend")) if path.is_dir() else [path]
        except OSError as error:
            raise TapeError(f"{path}: cannot be read ({error})") from error
        inside = [each for each in inside if not path.is_dir() or _NAME.fullmatch(each.name)]
        if not inside:
            raise TapeError(
                f"{path}: no tape in there; was the job given a diagnostics_dir? Set "
                "MEND_DIAGNOSTICS_DIR, and tape_max_mb above 0, and run it again"
            )
        for each in inside:
            first = _files_of(each)[0]
            firsts.setdefault((first.parent, first.name), first)
    return list(firsts.values())


def _files_of(path: Path) -> list[Path]:
    """Return all files of the tape that has this file, in order."""
    named = _NAME.fullmatch(path.name)
    if named is None:
        return [path]
    own = named.groups()[:3]
    numbered = []
    for each in path.parent.glob(f"tape-rack{own[0]}-rank{own[1]}*.mend"):
        other = _NAME.fullmatch(each.name)
        if other is not None and other.groups()[:3] == own:
            numbered.append((int(other[4] or 0), each))
    return [each for _, each in sorted(numbered)] or [path]


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's name before the text of an error."""
    try:
        yield
    except (TapeError, OSError) as error:
        raise TapeError(f"{path}: {error}") from error


def _checked(path: Path) -> tuple[Header, TapeFile, str]:
    """The header, the intact part of the file, and a sentence about the lost rest."""
    with open_regular(path) as file:
        begin = file.read(form.FILE_BYTES)
        if not begin:
            raise TapeError(
                "it is empty: its process could write nothing, or was killed before it did. Name "
                "the other tapes of its folder"
            )
        form.check_begin(begin)
        header, stop, lost = None, form.FILE_BYTES, ""
        for number in itertools.count():
            chunk, lost = _next_chunk(file, number, stop)
            header = header or _header_in(chunk, lost)
            if chunk is None or chunk[0].last:
                break
            stop += form.HEAD_BYTES + chunk[0].deflated
        ended = chunk is not None
        if ended and file.read(1):
            raise TapeError(f"there is data after its end (at byte {stop})")
    return (
        require(header, "the first chunk has no header"),
        TapeFile(path, stop, number, ended),
        lost,
    )


def _header_in(chunk: tuple[Head, bytes] | None, lost: str) -> Header:
    """Return the header in the first chunk of a file. Raises TapeError."""
    header: Header | Entry | Gap | Base | None = None
    for record in Unpacker().records(*chunk) if chunk and not chunk[0].last else ():
        header = form.read_record(record, 0)
    if isinstance(header, Header):
        return header
    raise TapeError(f"it ends before its header does ({lost or 'it is empty'})")


def _next_chunk(file: BinaryIO, number: int, place: int) -> tuple[tuple[Head, bytes] | None, str]:
    """The chunk and "", or None and a sentence about an incomplete chunk. After a crash of the
    machine a tail may consist of zeros. Raises TapeError for any other damage."""
    data = file.read(form.HEAD_BYTES)
    if len(data) < form.HEAD_BYTES:
        return None, _cut(len(data), place) if data else ""
    try:
        head = form.read_head(data, number)
    except TapeError as error:
        if not any(data) and not (rest := _rest(file))[1]:
            return None, _cut(len(data) + rest[0], place)
        raise TapeError(f"{error} (at byte {place})") from error
    deflated = file.read(head.deflated)
    if len(deflated) < head.deflated:
        return None, _cut(len(data) + len(deflated), place)
    try:
        form.check_chunk(head, deflated)
    except TapeError as error:
        if not (rest := _rest(file))[1]:
            return None, _cut(len(data) + len(deflated) + rest[0], place)
        raise TapeError(f"{error} (at byte {place})") from error
    return (head, deflated), ""


def _rest(file: BinaryIO) -> tuple[int, bool]:
    """The number of bytes that follow, and whether any of them is not zero."""
    count, anything = 0, False
    while piece := file.read(1 << 20):
        count, anything = count + len(piece), anything or any(piece)
    return count, anything


def _cut(count: int, place: int) -> str:
    return f"the tail is cut: {count} bytes from byte {place} on are not a whole chunk"


def _records(file: TapeFile) -> Iterator[bytes]:
    """The records of a checked file, without the header."""
    unpacker = Unpacker()
    place = form.FILE_BYTES
    with _naming(file.path), open_regular(file.path) as opened:
        opened.seek(place)
        for number in range(file.chunks):
            chunk, lost = _next_chunk(opened, number, place)
            if chunk is None:
                raise TapeError(f"it changed while it was read ({lost})")
            place += form.HEAD_BYTES + chunk[0].deflated
            records = unpacker.records(*chunk)
            if number == 0:  # the header, which is known
                next(records)
            yield from records
