"""Starts, reads and signals child processes, and leaves none behind.

No threads: the caller polls its children, and a child dies with the *thread* that started it
(see pdeathsig.py).
"""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import FrameType

from mend.errors import ConfigError, require

TOKEN = "LAUNCHED_BY_MEND"
"""Set for every process of a launch, to recognise its orphans. Not MEND_...: those are settings."""

RESTART = "RESTARTED_BY_MEND"
"""Variable with the number of restarts of a rack, for scripts."""

READ_BYTES = 1 << 16
READS_MAX = 16
"""Most reads in a row, so that a process that talks without end leaves the others their turn."""
KILL_ROUNDS_MAX = 50

Sink = Callable[[str, str], None]
"""(who: 'rack 0' | 'witness' | 'launch', line)."""


class Child:
    """One process in a session of its own, and its output cut into lines.

    `log`: a file that also gets all of it; `again`: append to the file.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        env: Mapping[str, str],
        sink: Sink,
        log: Path | None,
        *,
        again: bool = False,
    ) -> None:
        self.name, self._sink = name, sink
        self.reported = False
        tie = [sys.executable, str(Path(__file__).with_name("pdeathsig.py")), str(os.getpid())]
        self._log = self._open(log, again=again) if log is not None else None
        try:
            self.process = subprocess.Popen(
                [*tie, *command], env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError:
            if self._log is not None:
                self._log.close()
            raise
        self._pipe = require(self.process.stdout, "a pipe was asked for")
        os.set_blocking(self._pipe.fileno(), False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def _open(self, log: Path, *, again: bool) -> FileIO | None:
        """A next life does without a log that cannot be opened any more. Raises ConfigError."""
        try:
            return log.open("ab" if again else "wb", buffering=0)
        except OSError as error:
            if not again:
                rule, remedy = f"cannot be written ({error.strerror})", "Name another folder."
                raise ConfigError("--log-dir", str(log), rule, remedy) from error
            self._sink(self.name, f"log-stopped path={log} reason={error}")
            return None

    def running(self) -> bool:
        return self.process.poll() is None

    def await_line(self, seen: Callable[[], bool], limit_s: float) -> bool:
        """Read until `seen` is true. False: the process ended first, or the time did."""
        limit = time.monotonic() + limit_s
        while not seen():
            running = self.running()  # asked first, so that its last lines are read
            self.read()
            if seen():
                break
            if not running or time.monotonic() > limit:
                return False
            time.sleep(0.01)
        return True

    def signal(self, number: int) -> None:
        """Signal the whole process group, if it still runs: a reaped id may belong to another."""
        if self.running():
            os.killpg(self.process.pid, number)

    def ask(self, number: int) -> None:
        """A signal to the process alone: its children may not know it, and die of it."""
        if self.running():
            os.kill(self.process.pid, number)

    def read(self) -> None:
        """Pass on every whole line that is there. A carriage return ends one, too."""
        if self._pipe.closed:
            return
        with suppress(BlockingIOError):
            for _ in range(READS_MAX):
                chunk = os.read(self._pipe.fileno(), READ_BYTES)
                if not chunk:
                    return
                self._keep(chunk)
                self._text += self._decoder.decode(chunk).replace("\r\n", "\n").replace("\r", "\n")
                *lines, self._text = self._text.split("\n")
                for line in lines:
                    self._sink(self.name, line)

    def _keep(self, chunk: bytes) -> None:
        """A log that cannot be written (a full disk) ends here; its process goes on."""
        if self._log is None:
            return
        left = memoryview(chunk)
        try:
            while left:
                left = left[self._log.write(left) :]
        except OSError as error:
            self._sink(self.name, f"log-stopped path={self._log.name} reason={error}")
            self._log.close()
            self._log = None

    def close(self) -> None:
        """Reap it (it must be ending), pass on what it said last, close its files. Idempotent."""
        self.process.wait()
        if self._pipe.closed:
            return
        self.read()
        if self._text:
            self._sink(self.name, self._text)
        self._pipe.close()
        if self._log is not None:
            self._log.close()


def orphans(token: str, rack: int | None = None) -> list[int]:
    """Processes of a launch (of one rack, or of all) by their environment. Linux; elsewhere none.

    torchrun puts each worker into a session of its own, so killing its group would leave them.
    """
    marks = {f"{TOKEN}={token}".encode()}
    if rack is not None:
        marks.add(f"MEND_RACK={rack}".encode())
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()  # empty when it is a zombie
        except OSError:  # gone, or another user's
            continue
        if marks <= set(environment.split(b"\0")) and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def kill_orphans(token: str, rack: int | None = None) -> int:
    """SIGKILL until none is left (one may fork while it is looked for); returns how many."""
    killed: set[int] = set()
    for _ in range(KILL_ROUNDS_MAX):
        left = orphans(token, rack)
        if not left:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.02)
    return len(killed)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP inside `caught()`, instead of dying of them.

    A SIGHUP that is ignored (nohup) stays so: the terminal is gone, and the job goes on.
    """

    def __init__(self) -> None:
        self.first = 0
        self.count = 0
        self.asked = 0
        """How often SIGUSR1 came, by which schedulers announce that a limit is near."""

    def _ring(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1

    def _ask(self, _number: int, _: FrameType | None) -> None:
        self.asked += 1

    @contextmanager
    def caught(self, *, asked: bool = False) -> Iterator[None]:
        """`asked`: count SIGUSR1, too. Raises ValueError off the main thread, where Python delivers
        no signals."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._ring) for number in numbers}
        if asked:
            before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def separate_script(command: Sequence[str]) -> list[str]:
    """Return a script (or -m and a module) with its arguments behind "--", for torchrun, which
    otherwise refuses an argument of the script that begins as two of its own options do (--start).
    """
    options = ["-m"] if command[0] == "-m" else []
    return [*options, "--", *command[len(options) :]]
