"""Feeds a target, counts what became of its inputs, keeps those that it did not survive."""

from __future__ import annotations

import random
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

INPUT_SECONDS_MAX = 10.0
"""An input that takes longer hangs."""

RSS_GROWTH_BYTES_MAX = 64 << 20
"""Of a process, from a tenth of a target's inputs to the last: more is a leak."""

ROOM_BYTES = 6 << 30
"""Address space that a run may take besides what it has: a length that lies fails, at once."""


class Target(Protocol):
    """Something that takes bytes from outside."""

    name: str
    inputs: int
    """Of a full run."""

    def example(self, rng: random.Random) -> bytes:
        """The next input."""

    def take(self, data: bytes) -> str:
        """ "accepted", or the class of the reason. Whatever it raises is a defect."""

    def close(self) -> None:
        """Nothing is open, unless a target says otherwise."""
        return


@dataclass
class Defect:
    """One place that raised: the first input that did it, and how many more."""

    what: str
    data: bytes
    trace: str
    count: int = 1
    path: Path | None = None


@dataclass
class Result:
    name: str
    inputs: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    defects: dict[str, Defect] = field(default_factory=dict)
    slowest_s: float = 0.0
    seconds: float = 0.0
    grown_bytes: int = 0

    @property
    def accepted(self) -> int:
        return self.reasons["accepted"]

    @property
    def refused(self) -> int:
        return sum(self.reasons.values()) - self.accepted

    @property
    def crashes(self) -> int:
        return sum(defect.count for defect in self.defects.values())


class Hang(BaseException):
    """Not an Exception: nothing that is tested may catch it."""


def fuzz(
    target: Target,
    inputs: int,
    seed: int,
    *,
    until_s: float | None = None,
    keep: Path | None = None,
    watch: bool = False,
    say: Callable[[Result], None] = lambda result: None,
) -> Result:
    """`until_s`: no further input after this `time.monotonic()`. `keep`: folder of the inputs that
    failed. `watch`: an input may not hang (needs the main thread and its alarm)."""
    rng, result = random.Random(f"{target.name} {seed}"), Result(target.name)
    began, base = time.monotonic(), rss_bytes()
    told = began
    for number in range(inputs):
        data = target.example(rng)
        with _no_longer_than(INPUT_SECONDS_MAX if watch else None):
            since = time.perf_counter()
            _one(target, data, result)
            result.slowest_s = max(result.slowest_s, time.perf_counter() - since)
        result.inputs += 1
        if number == inputs // 10:
            base = rss_bytes()
        if number % 64 == 0 and (now := time.monotonic()) > told + 10:
            told = now
            say(result)
            if until_s is not None and now > until_s:
                break
    result.seconds = time.monotonic() - began
    result.grown_bytes = rss_bytes() - base
    if keep is not None:
        _save(result, keep)
    return result


def _one(target: Target, data: bytes, result: Result) -> None:
    try:
        result.reasons[target.take(data)] += 1
    except (Exception, Hang) as error:
        place = _place(error)
        if place in result.defects:
            result.defects[place].count += 1
        else:
            result.defects[place] = Defect(place, data, traceback.format_exc())


def _place(error: BaseException) -> str:
    """Where it was raised: the last line of mend's on the way, or the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/mend/" in frame.filename] or frames
    name = ours[-1].filename.rpartition("/mend/" if ours is not frames else "/")[2]
    return f"{type(error).__name__} at {name}:{ours[-1].lineno} {ours[-1].name}"


@contextmanager
def _no_longer_than(seconds: float | None) -> Iterator[None]:
    if seconds is None:
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise Hang(f"an input took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    others = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


def _save(result: Result, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, defect in enumerate(result.defects.values(), start=1):
        defect.path = folder / f"{result.name}-{number}.bin"
        defect.path.write_bytes(defect.data)


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def limit_memory() -> None:
    """From here on this process cannot take more than ROOM_BYTES of addresses besides its own."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM_BYTES, resource.RLIM_INFINITY))
