"""One run of a training script for `mend repro`: starts it, says how far it is, ends it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mend.determinism.comparison import Recording, recording_of, steps_of_all
from mend.determinism.recorder import HASH_SEED_CHOSEN
from mend.errors import UsageError
from mend.tools.processes import TOKEN, Child, Interrupts, kill_orphans, orphans, separate_script

POLL_S = 0.05
FIRST_S = 2.0
"""Time until a run first says how far it is."""

SAY_S = 5.0
"""Time between two such lines."""

LEAVE_S = 5.0
"""Time that a script has to end after a first Ctrl-C."""

END_S = 60.0
"""Seconds that a script has to end after its last step, where that is known."""

STACKS_S = 5.0
"""Time that a script that is ended has to print where it hangs."""

LAST_LINES = 20
LINE_CHARS_MAX = 80

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunSetting:
    """The setting of one of the two runs. `processes` 0: plain python, else torchrun."""

    name: str
    processes: int = 0
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    hash_seed: str = ""
    """PYTHONHASHSEED, where the environment has none; empty: Python draws one."""

    @property
    def chooses_hash_seed(self) -> bool:
        """Whether hash_seed is used."""
        return bool(self.hash_seed) and "PYTHONHASHSEED" not in {**os.environ, **self.env}


@dataclass(frozen=True)
class RunExtent:
    """The part of a run that is recorded. 0: not known, or none."""

    last: int = 0
    """The step after which the run is ended; 0: it ends by itself."""
    detail: tuple[int, int] = (0, 0)
    """First and last of the steps that are recorded with their operators."""
    made: int = 0
    """Steps that the other run has made."""
    rows: bool = False
    """Whether the rows of the batch are recorded."""
    limit_s: float = 0.0
    """Seconds until the run counts as hung; 0: it may take any time."""
    phase: str = ""
    """For people to read."""


@dataclass(frozen=True)
class Asked:
    command: tuple[str, ...]
    """A script and its arguments, or -m and a module."""
    settings: tuple[RunSetting, RunSetting]
    steps: int = 0
    """0: all that the script makes."""
    keep: Path | None = None
    as_json: bool = False


class Stopped(Exception):
    """Ctrl-C stopped the runs."""


def read(folder: Path) -> list[Recording]:
    """Read the recordings of all ranks, in their order. Raises UsageError."""
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise UsageError(f"{folder} has no rank-N.jsonl; mend repro --record FOLDER makes them")
    found = sorted((recording_of(_records(path)) for path in paths), key=lambda each: each.rank)
    if len(found) != found[0].header["ranks"]:
        raise UsageError(f"{folder}: {len(found)} of {found[0].header['ranks']} ranks are there")
    if not steps_of_all(found):
        raise UsageError(
            f"{folder}: no step of a torch optimizer was seen; the script must train in the "
            "process that is started (not in one that it spawns) and call optimizer.step()"
        )
    return found


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}:{number} is cut off or damaged: {error}") from None


def recorded(
    asked: Asked, setting: RunSetting, folder: Path, extent: RunExtent, say: Say
) -> list[Recording]:
    """Run the script once; returns the recordings of its ranks. Raises as run_once does."""
    own = folder / (f"{setting.name}-operators" if extent.detail[1] else setting.name)
    own.mkdir(parents=True, exist_ok=True)
    run_once(asked, setting, own, extent, say)
    return read(own)


def command_of(asked: Asked, setting: RunSetting, folder: Path, extent: RunExtent) -> list[str]:
    steps = [str(extent.last), "{}:{}".format(*extent.detail), "rows" if extent.rows else "-"]
    child = ["-m", "mend.tools.repro_child", str(folder), *steps]
    script = [*asked.command, *setting.arguments]
    if not setting.processes:
        return [sys.executable, *child, *script]
    return [
        *(sys.executable, "-m", "mend.tools.torchrun", "--max-restarts=0"),
        *("--nnodes", "1", "--nproc-per-node", str(setting.processes)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *separate_script([*child, *script]),
    ]


def run_once(asked: Asked, setting: RunSetting, folder: Path, extent: RunExtent, say: Say) -> None:
    """Run the script once. Raises UsageError if it fails, Stopped at Ctrl-C. A script that hangs
    after its last step, as some do in destroy_process_group(), is ended after END_S; what it has
    recorded is whole. Leaves no process behind."""
    for old in folder.glob("rank-*.jsonl"):
        old.unlink()
    token, lines, interrupts = os.urandom(8).hex(), deque[str](maxlen=LAST_LINES), Interrupts()
    command = command_of(asked, setting, folder, extent)
    title = f"run {setting.name} {extent.phase}".strip()
    last = extent.last or extent.made
    with interrupts.caught():
        child = Child(
            setting.name, command, _environment(setting, token),
            lambda _, line: lines.append(line), folder / "output.log",
        )  # fmt: skip
        try:
            end = _End(folder, setting.processes or 1, last, extent.limit_s)
            _wait(child, interrupts, RunProgress(title, folder, say, last, lines), end)
            if end.hangs:
                _ask_where(child, token)
        finally:
            kill_orphans(token)
            child.signal(signal.SIGKILL)
            child.close()
    if interrupts.count:
        raise Stopped
    if end.late:
        raise UsageError(f"{title} was killed: it has not ended in {extent.limit_s:.0f} s")
    if end.hangs:
        say(f"{title}: killed {END_S:g} s after step {last}, its last step")
        say(f"{title}: its last lines, and the calls in which it hung:")
        for line in lines:
            say(f"    {line}")
        return
    if code := child.process.returncode:
        tail = "\n  ".join(lines)
        raise UsageError(f"{title} ended with status {code}:\n  {tail}")


def _environment(setting: RunSetting, token: str) -> dict[str, str]:
    env = {**os.environ, **setting.env, TOKEN: token}
    if setting.chooses_hash_seed:
        env |= {"PYTHONHASHSEED": setting.hash_seed, HASH_SEED_CHOSEN: "1"}
    return env


def _wait(child: Child, interrupts: Interrupts, progress: RunProgress, end: _End) -> None:
    seen, kill_s = 0, 0.0
    while child.running():
        time.sleep(POLL_S)
        child.read()
        progress.look()
        if end.look():
            return
        count = interrupts.count
        if count > seen:
            child.signal(signal.Signals(interrupts.first))
            kill_s, seen = time.monotonic() + LEAVE_S, count
        if seen > 1 or (seen and time.monotonic() > kill_s):
            return


def _ask_where(child: Child, token: str) -> None:
    """End a run by SIGABRT, at which repro_child prints the calls of all threads of a rank."""
    for pid in orphans(token):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    limit_s = time.monotonic() + STACKS_S
    while orphans(token) and time.monotonic() < limit_s:
        child.read()
        time.sleep(POLL_S)
    child.read()


class _End:
    """Finds out whether a run hangs: every rank has recorded the last step, and then none anything
    more for END_S. Or it is `late`: limit_s have passed."""

    def __init__(self, folder: Path, ranks: int, last: int, limit_s: float) -> None:
        self._folder, self._ranks, self._last = folder, ranks, last
        self._size, self._since_s = 0, time.monotonic()
        self._late_s = self._since_s + limit_s if limit_s else float("inf")
        self.hangs = self.late = False

    def look(self) -> bool:
        self.late = time.monotonic() > self._late_s
        if self.late or not self._last or time.monotonic() < self._since_s + END_S:
            return self.late
        paths = list(self._folder.glob("rank-*.jsonl"))
        size = sum(path.stat().st_size for path in paths)
        still, self._size, self._since_s = size == self._size, size, time.monotonic()
        done = f'{{"step": {self._last}, "end": true,'.encode()
        self.hangs = still and len(paths) == self._ranks and all(_has(path, done) for path in paths)
        return self.hangs


def _has(path: Path, beginning: bytes) -> bool:
    with path.open("rb") as lines:
        return any(line.startswith(beginning) for line in lines)


class RunProgress:
    """Says how far a run is, by the file of rank 0: the phase, the steps and the time left.

    `total`: steps that it will make, 0: not known. `lines`: what the script said last.
    """

    def __init__(
        self, title: str, folder: Path, say: Say, total: int, lines: Sequence[str] = ()
    ) -> None:
        self._title, self._path, self._say = title, folder / "rank-0.jsonl", say
        self._total, self._lines, self._at, self._steps = total, lines, 0, 0
        self._began_s = time.monotonic()
        self._next_s, self._first = self._began_s + FIRST_S, (0, 0.0)

    def look(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAY_S
        self._count()
        if not self._steps:
            last = f"; the script said: {self._lines[-1][:LINE_CHARS_MAX]}" if self._lines else ""
            waited = f"no step of an optimizer yet, {now_s - self._began_s:.0f} s"
            self._say(f"{self._title}: {waited}{last}")
            return
        if not self._first[0]:
            self._first = self._steps, now_s
        of = f" of {self._total}" if self._total else ""
        took = f"{now_s - self._began_s:.0f} s{self._left(now_s)}"
        self._say(f"{self._title}: step {self._steps}{of}, {took}")

    def _count(self) -> None:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
            self._at += len(new)
            self._steps += new.count(b'"end": true')

    def _left(self, now_s: float) -> str:
        """Not known while the total is not; from the second line on without the start."""
        steps, since_s = self._first
        if not self._total:
            return ", until the script ends (--steps N ends it earlier)"
        if self._steps >= self._total:
            return ", ending"
        if self._steps == steps:
            steps, since_s = 0, self._began_s
        each_s = (now_s - since_s) / (self._steps - steps)
        return f", {each_s * (self._total - self._steps):.0f} s left"
