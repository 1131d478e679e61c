"""`mend repro`: runs a training script twice and finds where the runs part."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from mend.determinism.comparison import (
    Finding,
    Recording,
    Run,
    compare,
    different_facts,
    recording_of,
    steps_of_all,
)
from mend.errors import UsageError
from mend.tools.processes import (
    TOKEN,
    Child,
    Interrupts,
    kill_orphans,
    orphans,
    separate_script,
)

EQUAL, DIFFERENT, INTERRUPTED = 0, 1, 130

POLL_S = 0.05
SAY_S = 5.0
"""Time between two lines that say how far a run is."""

LEAVE_S = 5.0
"""Time that a script has to end after a first Ctrl-C."""

END_S = 60.0
"""Seconds that a script has to end after its last step, where that is known."""

STACKS_S = 5.0
"""Time that a script that is ended has to print where it hangs."""

LAST_LINES = 20
DETAILS_MAX = 3
"""Pairs of runs with operators recorded: what depends on time may part at another step again."""

WINDOW_STEPS = 8
"""Most steps that are recorded with their operators."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """The setting of one of the two runs. `processes` 0: plain python, else torchrun."""

    name: str
    processes: int = 0
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Extent:
    """The part of a run that is recorded. 0: not known, or none."""

    last: int = 0
    """The step after which the run is ended; 0: it ends by itself."""
    detail: tuple[int, int] = (0, 0)
    """First and last of the steps that are recorded with their operators."""
    made: int = 0
    """Steps that the other run has made."""


@dataclass(frozen=True)
class Asked:
    command: tuple[str, ...]
    """A script and its arguments, or -m and a module."""
    settings: tuple[Setting, Setting]
    steps: int = 0
    """0: all that the script makes."""
    keep: Path | None = None
    as_json: bool = False


HOW = (
    "give a script to run twice, as in `mend repro -- train.py`, or two folders "
    "that --record wrote, as in `mend repro here there`"
)


class Stopped(Exception):
    """Ctrl-C stopped the runs."""


def repro(asked: Asked) -> int:
    """Returns the exit status. Raises UsageError where a run fails or makes no step."""
    say = _sayer(asked.as_json)
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            one, other, finding, pairs = search(asked, folder, say)
        except Stopped:
            say("stopped")
            return INTERRUPTED
    return print_verdict(one, other, finding, asked.as_json, pairs)


def search(asked: Asked, folder: Path, say: Say) -> tuple[Run, Run, Finding | None, int]:
    """Both runs; if they part, again with the operators of that step. The last int: pairs made."""
    one = _record(asked, asked.settings[0], folder, Extent(asked.steps), say)
    extent = Extent(asked.steps, made=asked.steps or len(one[0].steps))
    other = _record(asked, asked.settings[1], folder, extent, say)
    finding = first = compare(one, other)
    seen: list[int] = []
    for pairs in range(1, 1 + DETAILS_MAX):
        if first is None or first.located or first.part == "length":
            return one, other, first, pairs
        if finding is not None:
            seen.append(finding.step)
        detail = (min(seen), min(max(seen), min(seen) + WINDOW_STEPS - 1))
        say(
            f"the runs differ at step {seen[-1]}; "
            f"repeating them with the operators of {_steps(*detail)}"
        )
        extent = Extent(detail[1], detail)
        again = [_record(asked, each, folder, extent, say) for each in asked.settings]
        finding = compare(again[0], again[1])
        if finding is not None and finding.located:
            return one, other, finding, pairs + 1
    return one, other, first, 1 + DETAILS_MAX


def record(asked: Asked, folder: Path, detail: tuple[int, int]) -> int:
    """One run, under the first setting, kept for a comparison with that of another machine."""
    say = _sayer(asked.as_json)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run(asked, asked.settings[0], folder, Extent(detail[1] or asked.steps, detail), say)
    except Stopped:
        say("stopped")
        return INTERRUPTED
    say(f"recorded {len(read(folder)[0].steps)} steps in {folder}")
    return EQUAL


def compare_folders(folders: Sequence[Path], as_json: bool) -> int:
    """Compare what two machines have recorded."""
    if len(folders) != 2:
        raise UsageError(HOW)
    one, other = (read(folder) for folder in folders)
    return print_verdict(one, other, compare(one, other), as_json, 1)


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


# one run


def _record(
    asked: Asked, setting: Setting, folder: Path, extent: Extent, say: Say
) -> list[Recording]:
    own = folder / (f"{setting.name}-operators" if extent.detail[1] else setting.name)
    own.mkdir(parents=True, exist_ok=True)
    _run(asked, setting, own, extent, say)
    return read(own)


def command_of(asked: Asked, setting: Setting, folder: Path, extent: Extent) -> list[str]:
    steps = [str(extent.last), "{}:{}".format(*extent.detail)]
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


def _run(asked: Asked, setting: Setting, folder: Path, extent: Extent, say: Say) -> None:
    """Run the script once. Raises UsageError if it fails, Stopped at Ctrl-C. A script that hangs
    after its last step, as some do in destroy_process_group(), is ended after END_S; what it has
    recorded is whole. Leaves no process behind."""
    for old in folder.glob("rank-*.jsonl"):
        old.unlink()
    token, lines, interrupts = os.urandom(8).hex(), deque[str](maxlen=LAST_LINES), Interrupts()
    command = command_of(asked, setting, folder, extent)
    last = extent.last or extent.made
    env = {**os.environ, **setting.env, TOKEN: token}
    with interrupts.caught():
        child = Child(
            setting.name, command, env, lambda _, line: lines.append(line), folder / "output.log"
        )
        try:
            end = _End(folder, setting.processes or 1, last)
            _wait(child, interrupts, _Progress(setting.name, folder, say), end)
            if end.hangs:
                _ask_where(child, token)
        finally:
            kill_orphans(token)
            child.signal(signal.SIGKILL)
            child.close()
    if interrupts.count:
        raise Stopped
    if end.hangs:
        say(f"run {setting.name}: killed {END_S:g} s after step {last}, its last step")
        say(f"run {setting.name}: its last lines, and the calls in which it hung:")
        for line in lines:
            say(f"    {line}")
        return
    if code := child.process.returncode:
        tail = "\n  ".join(lines)
        raise UsageError(f"run {setting.name} ended with status {code}:\n  {tail}")


def _wait(child: Child, interrupts: Interrupts, progress: _Progress, end: _End) -> None:
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
    more for END_S."""

    def __init__(self, folder: Path, ranks: int, last: int) -> None:
        self._folder, self._ranks, self._last = folder, ranks, last
        self._size, self._since_s = 0, time.monotonic()
        self.hangs = False

    def look(self) -> bool:
        if not self._last or time.monotonic() < self._since_s + END_S:
            return False
        paths = list(self._folder.glob("rank-*.jsonl"))
        size = sum(path.stat().st_size for path in paths)
        still, self._size, self._since_s = size == self._size, size, time.monotonic()
        done = f'{{"step": {self._last}, "end": true,'.encode()
        self.hangs = still and len(paths) == self._ranks and all(_has(path, done) for path in paths)
        return self.hangs


def _has(path: Path, beginning: bytes) -> bool:
    with path.open("rb") as lines:
        return any(line.startswith(beginning) for line in lines)


class _Progress:
    """Steps of rank 0 so far, from its file."""

    def __init__(self, name: str, folder: Path, say: Say) -> None:
        self._name, self._path, self._say = name, folder / "rank-0.jsonl", say
        self._at, self._steps, self._next_s = 0, 0, time.monotonic() + SAY_S

    def look(self) -> None:
        if time.monotonic() < self._next_s or not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        self._at += len(new)
        self._steps += new.count(b'"end": true')
        self._next_s = time.monotonic() + SAY_S
        self._say(f"run {self._name}: {self._steps} steps")


# what is said


def _sayer(as_json: bool) -> Say:
    """Progress; with --json it is on stderr, so that stdout is JSON alone."""
    return lambda line: typer.echo(f"repro: {line}", err=as_json)


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def print_verdict(one: Run, other: Run, finding: Finding | None, as_json: bool, pairs: int) -> int:
    """Print the verdict; returns the exit status."""
    steps, facts = min(map(steps_of_all, (one, other))), different_facts(one, other)
    if as_json:
        found = None if finding is None else asdict(finding)
        verdict = {"equal": finding is None, "steps": steps, "ranks": [len(one), len(other)]}
        typer.echo(json.dumps({**verdict, "pairs": pairs, "facts": facts, "finding": found}))
        return EQUAL if finding is None else DIFFERENT
    if finding is None:
        typer.echo(f"equal: {steps} steps: losses, gradients, weights, optimizer")
        return EQUAL
    typer.echo("\n".join(lines_of(finding, facts, pairs)))
    return DIFFERENT


def lines_of(finding: Finding, facts: Sequence[str], pairs: int) -> list[str]:
    """A finding for people."""
    named = f" ({finding.name})" if finding.name else ""
    rows = {
        "direction": finding.direction,
        "module": finding.module,
        "operator": finding.operator,
        "likely": finding.cause,
        "settings": "; ".join(facts),
    }
    if not finding.located and finding.part != "length":
        rows["likely"] = (
            "record both again with --at " + str(finding.step)
            if pairs == 1
            else f"depends on time: {pairs} pairs of runs did not part at a step whose operators "
            "were recorded, which slows them down"
        )
    head = f"different: step {finding.step}, {finding.part}{named}, rank {finding.rank}"
    return [head, *(f"    {name:<11}{value}" for name, value in rows.items() if value)]
