"""Writes tape files on a thread of its own. `trace.reader` reads them.

The loop only appends events and effects to a queue. They are frozen, so the thread can encode them
later. A disk that is full or hangs loses tape, never training.

Files of one process: `tape-rack0-rank0.mend`, then `tape-rack0-rank0.1.mend` and so on, each some
SEGMENT_BYTES and readable by itself: the later ones begin with the state of the machines, which the
loop writes down between two events. A process that finds a tape of an earlier life writes
`tape-rack0-rank0-life2.mend`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from msgspec.structs import replace

from mend.coordination.events import Effect, Encoded, Event, Machine, StateTaken
from mend.coordination.machines import ProcessSpec
from mend.errors import diagnostics_remedy, format_error, require
from mend.events.base import Emit
from mend.events.kinds import TapeGap, TapeStopped, TapeWithoutBase
from mend.trace import format as form
from mend.trace.format import Base, Gap, Header, Packer
from mend.trace.state import encode_state
from mend.types import MB, VERSION

FLUSH_S = 0.25
"""How long an entry waits for others before it is written; a killed process loses at most that."""

AT_ONCE = (Encoded, StateTaken)
"""Events that are written at once, with all waiting entries: other racks use their results, so a
replay of the job needs them even if the process is killed right afterwards."""

WAITING_MAX = 8_192
"""Limit of entries that wait for a slow disk; further ones become a gap."""

SEGMENT_BYTES = 64 << 20
LIVES_MAX = 1_000
CLOSE_S = 5.0

TOO_SLOW = "the disk was too slow"

_Item = tuple[str, int, Event, Sequence[Effect], str] | Gap | Base


class Tape(Protocol):
    """Receives the events of a process's machines. Returns at once."""

    def put(
        self, machine: str, now_ns: int, event: Event, effects: Sequence[Effect], error: str = ""
    ) -> None: ...


def handled(tape: Tape, name: str, machine: Machine, event: Event, now_ns: int) -> list[Effect]:
    """Let the machine handle the event, and put the event and the effects on the tape."""
    try:
        effects = machine.handle(event, now_ns)
    except Exception as error:
        tape.put(name, now_ns, event, (), format_error(error))
        raise
    tape.put(name, now_ns, event, effects)
    return effects


def header_of(
    job: str, parts: ProcessSpec, config: Mapping[str, Any] | None = None, **more: Any
) -> Header:
    """The header of this process's tape. `more`: further fields of it."""
    return Header(
        job=job,
        rack=parts.me.rack,
        rank=parts.me.rank,
        parts=parts,
        argv=tuple(map(_encodable, sys.orig_argv)),
        config=_encodable(dict(config or {})),
        versions={"mend": VERSION, "python": platform.python_version(), **_of_torch()},
        wall_ns=time.time_ns(),
        mono_ns=time.monotonic_ns(),
        **more,
    )


def _encodable(value: Any) -> Any:
    """The same for UTF-8: a path has lone surrogates for bytes that are not text in the locale of
    the process, as all beyond ASCII with LANG=C."""
    if isinstance(value, dict):
        return {key: _encodable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(each) for each in value]
    if isinstance(value, str | Path):
        return str(value).encode(errors="backslashreplace").decode()
    return value


def _of_torch() -> dict[str, str]:
    """The version and threads of torch; empty where it is not loaded, as in a witness."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {"torch": str(torch.__version__), "threads": str(torch.get_num_threads())}


def begin(folder: Path | None, mb_max: int, header: Header, note: Emit) -> TapeWriter | None:
    """Open a tape, if there is a folder for it and `mb_max` is not 0."""
    return TapeWriter(folder, header, mb_max * MB, note) if folder and mb_max else None


class TapeWriter:
    """A tape on disk. `note` gets one event if it stops, and one for each gap."""

    def __init__(self, folder: Path, header: Header, bytes_max: int, note: Emit) -> None:
        self.lost = 0
        """Entries that will not be on it."""
        self._note = note
        self._files = _Files(folder, header, bytes_max)
        self._waiting: deque[_Item] = deque()
        self._missed = 0
        self._machines: Mapping[str, Machine] = {}
        self._asked = self._full = False
        """The writer waits for the base of the next file; the loop has not encoded it yet."""
        self._stopped = self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._write, name="mend-tape", daemon=True)
        self._thread.start()

    def watch(self, machines: Mapping[str, Machine]) -> None:
        """Set the machines whose events will follow, so that later files begin with their state.
        Call it before the first event."""
        self._machines = machines

    def put(
        self, machine: str, now_ns: int, event: Event, effects: Sequence[Effect], error: str = ""
    ) -> None:
        """Loop thread only. Never blocks."""
        if self._stopped or len(self._waiting) >= WAITING_MAX:
            self.lost += 1
            self._missed += 1
            return
        if self._missed:
            self._waiting.append(Gap(self._missed, TOO_SLOW))
            self._missed = 0
        self._waiting.append((machine, now_ns, event, effects, error))
        if isinstance(event, AT_ONCE):
            self._wake.set()
        if self._full:
            self._full = False
            self._waiting.append(self._base())

    def _base(self) -> Base:
        """The state of all machines after the newest event; empty if it cannot be encoded."""
        try:
            state = encode_state(self._machines)
            if len(state) < form.RECORD_BYTES_MAX:
                return Base(state)
            reason = f"{len(state)} bytes are too many"
        except Exception as error:  # training goes on, with a tape that explains but cannot begin
            reason = format_error(error)
        self._note(TapeWithoutBase(reason))
        return Base(b"")

    def close(self) -> None:
        """Write the waiting entries and the end. Waits only a few seconds for a disk that hangs."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive() and not self._stopped:
            self._stopped = True
            reason, remedy = "the disk hangs at the end", "use a disk that answers"
            self._note(TapeStopped(str(self._files.path), reason, remedy))

    # -------------------------------------------------------------- the writer's thread

    def _write(self) -> None:
        try:
            self._files.open()
            while not self._closing:
                self._wake.wait(FLUSH_S)
                self._wake.clear()
                self._flush()
            self._flush()  # entries that came during the last flush
            if self._missed:
                self._files.write([self._record(Gap(self._missed, TOO_SLOW))])
            self._files.end()
        except Exception as error:  # training continues without a tape
            self._stop(error)
        finally:
            with contextlib.suppress(OSError):  # it would write again what does not fit
                self._files.close()

    def _flush(self) -> None:
        self._files.check()
        records: list[bytes] = []
        size = 0
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, Base):
                self._put(records)
                self._files.rotate(item)
                records, size, self._asked = [], 0, False
                continue
            record = self._record(item)
            if records and size + len(record) > form.CHUNK_RAW_BYTES:
                self._put(records)
                records, size = [], 0
            records.append(record)
            size += len(record)
        self._put(records)

    def _put(self, records: Sequence[bytes]) -> None:
        """A file that is full ends with the next base; at once where none can come."""
        self._files.write(records)
        if self._files.full and not self._machines:
            self._files.rotate(Base(b""))
        elif self._files.full and not self._asked:
            self._asked = self._full = True

    def _record(self, item: tuple[str, int, Event, Sequence[Effect], str] | Gap) -> bytes:
        if isinstance(item, Gap):
            self._note(TapeGap(item.count, item.reason))
            return form.record_of(item)
        record = form.record_of_entry(*item)
        if len(record) <= form.RECORD_BYTES_MAX:
            return record
        self.lost += 1
        return self._record(Gap(1, f"one of {len(record)} bytes is too long"))

    def _stop(self, error: Exception) -> None:
        self._stopped = True
        self.lost += len(self._waiting)
        self._waiting.clear()
        gone = isinstance(error, FileNotFoundError) and self._files.begun
        remedy = "leave the folder where it is" if gone else diagnostics_remedy(error)
        reason = str(error) or repr(error)
        self._note(TapeStopped(str(self._files.path), reason, remedy))


class _Files:
    """The files of one tape, the newest open. Any OSError is the caller's."""

    def __init__(self, folder: Path, header: Header, bytes_max: int) -> None:
        self._folder, self._header, self._bytes_max = folder, header, bytes_max
        self._segment_bytes = max(1, min(SEGMENT_BYTES, bytes_max // 4))
        self._stem = f"tape-rack{header.rack}-rank{header.rank}"
        self._sizes: dict[Path, int] = {}
        """Sizes of the files that are still there, oldest first."""
        self._segment = self._begin_bytes = 0
        self._packer = Packer()
        self._file: BinaryIO | None = None
        self.path = folder / f"{self._stem}.mend"

    def open(self) -> None:
        """The first file, under a name that no earlier life of this rank has."""
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = self._stem
        for life in itertools.count(2):
            try:
                if any(self._folder.glob(f"{self._stem}.*mend")):  # its first files may be gone
                    raise FileExistsError(f"{self.path} has a tape of an earlier life beside it")
                self._file = self.path.open("xb")
                break
            except FileExistsError:
                if life > LIVES_MAX:
                    raise
                self._stem = f"{stem}-life{life}"
                self.path = self._folder / f"{self._stem}.mend"
        self._begin(Base(b""))

    @property
    def begun(self) -> bool:
        """There has been a file."""
        return bool(self._sizes)

    @property
    def full(self) -> bool:
        """The next file should begin. The header and state that a file begins with do not count."""
        return self._sizes[self.path] - self._begin_bytes >= self._segment_bytes

    def write(self, records: Sequence[bytes]) -> None:
        if records:
            self._append(self._packer.chunk(records))

    def check(self) -> None:
        """Check that the file still exists: writes to a removed one are lost silently."""
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError("the file was removed")

    def end(self) -> None:
        self._append(self._packer.end())

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _begin(self, base: Base) -> None:
        self._packer = Packer()
        self._sizes[self.path] = 0
        header = replace(self._header, segment=self._segment)
        chunk = self._packer.chunk([form.record_of(header)])
        self._append(form.file_begin() + chunk)
        if base.state:
            self._append(self._packer.chunk([form.record_of(base)]))
        self._begin_bytes = self._sizes[self.path]

    def rotate(self, base: Base) -> None:
        """Begin the next file with this base; remove old files where there is no room."""
        self.close()
        self._segment += 1
        self.path = self._folder / f"{self._stem}.{self._segment}.mend"
        self._file = self.path.open("xb")
        room = self._bytes_max - self._segment_bytes - self._begin_bytes
        while self._sizes and sum(self._sizes.values()) > room:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]
        self._begin(base)

    def _append(self, data: bytes) -> None:
        file = require(self._file, "no file of the tape is open")
        file.write(data)
        file.flush()
        self._sizes[self.path] += len(data)
