"""benchmarks._work: racks that train by sleeping, and a stream of their observations.

The benchmarks of failures start these, kill some, and read from the stream which racks were merged
when. A step sleeps, so that two cores are enough for several racks: they measure waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

import mend
from benchmarks._common import Flat, Option, RackArgs, Racks, noise

END = "end"
LOST_S = 120.0
"""No benchmark waits longer for something that must come."""

JOB: dict[str, Option] = {
    "numel": (1 << 16, "fp32 elements"),
    "fragments": (2, "P"),
    "gap": (8, "steps between merges"),
    "step_ms": (25.0, "of training"),
}
"""Options of a job of these racks."""


@dataclass(frozen=True, slots=True)
class Seen:
    """State of a rack after a step in which a merge, a loss or its own end came. `at_s` is
    time.monotonic, which all processes of a machine share."""

    rack: int
    at_s: float
    step: int
    commits: int
    merged: tuple[int, ...]
    """Racks of the newest merge."""
    live: tuple[int, ...]
    stall_ms: float
    """Waited by its training so far."""
    mend_ms: float
    """All wall time inside mend so far: captures and applies, too."""
    longest_ms: float
    """The longest time inside mend of one step since the last of these."""
    tokens: int = 0
    tokens_merged: float = 0.0
    dropped: int = 0
    """Offers of this rack that were too old to be merged; their tokens are in the next ones."""
    began_s: float = 0.0
    """Begin of its first step."""
    init_s: float = 0.0
    """Duration of mend_init."""
    last: bool = False


@dataclass
class Job:
    """Racks at work and all that they saw, oldest first."""

    racks: Racks
    seen: list[Seen] = field(default_factory=list)
    over: set[int] = field(default_factory=set)

    def until(self, wanted: Callable[[Seen], bool], timeout_s: float) -> Seen | None:
        """The first observation from now on that fits; None if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            for seen in self._read(left_s):
                if wanted(seen):
                    return seen
        return None

    def run(self, seconds: float) -> None:
        """Let the racks train on."""
        self.until(lambda _: False, seconds)

    def must(self, wanted: Callable[[Seen], bool], what: str) -> Seen:
        """Wait as `until` does; raise RuntimeError after LOST_S."""
        seen = self.until(wanted, LOST_S)
        if seen is None:
            raise RuntimeError(f"it never came that {what}; last seen: {self.seen[-3:]}")
        return seen

    def end(self) -> dict[int, Seen]:
        """End the racks; returns the last observation of each."""
        for rack in set(self.racks.pipes) - self.over:
            self.racks.pipes[rack].send(END)
        while set(self.racks.pipes) - self.over:
            if self.until(lambda seen: seen.last, LOST_S) is None:
                raise RuntimeError("a rack does not end")
        return {seen.rack: seen for seen in self.seen if seen.last}

    def kill(self, rack: int) -> float:
        """Returns when it was killed. Its observations that were not read yet are lost."""
        at_s = self.racks.kill(rack)
        self.over.add(rack)
        return at_s

    def start(self, rack: int) -> float:
        """Returns when it was started."""
        at_s = time.monotonic()
        self.racks.start(rack)
        self.over.discard(rack)
        return at_s

    def _read(self, timeout_s: float) -> Iterable[Seen]:
        by_pipe = {id(self.racks.pipes[r]): r for r in set(self.racks.pipes) - self.over}
        pipes = [self.racks.pipes[rack] for rack in by_pipe.values()]
        for pipe in wait(pipes, timeout_s):
            assert isinstance(pipe, Connection)
            try:
                seen = pipe.recv()
            except EOFError:
                rack = by_pipe[id(pipe)]
                raise RuntimeError(f"rack {rack} died by itself; its message is above") from None
            if seen.last:
                self.over.add(seen.rack)
            self.seen.append(seen)
            yield seen


@contextlib.contextmanager
def run_racks(
    rack: Callable[[RackArgs], None],
    options: argparse.Namespace,
    count: int = 2,
    with_witness: bool = False,
) -> Iterator[Job]:
    """A job of `count` racks, each started as `rack`; closed on the way out."""
    job = Job(Racks(rack, options, count, with_witness))
    try:
        job.racks.start_all()
        yield job
    finally:
        job.racks.close()


def train_racks(
    rack: Callable[[RackArgs], None], options: argparse.Namespace, count: int
) -> dict[int, Seen]:
    """The last observation of each of `count` racks, `options.seconds` after the first merge."""
    with run_racks(rack, options, count) as job:
        job.must(lambda seen: seen.commits > 0, "the first merge is made")
        job.run(options.seconds)
        return job.end()


def every_gap(options: argparse.Namespace) -> dict[str, int]:
    """Settings for a capture every `options.gap` steps, applied half a gap later."""
    return {"sync_period_steps": options.gap * options.fragments, "overlap_steps": options.gap // 2}


def work(args: RackArgs, step_ms: float, *, tokens: int = 1, **settings: Any) -> None:
    """The process of a rack: train until told to end, and send observations. It leaves at once
    then, without merging the rest. `tokens`: of a step."""
    # As torchrun sets it for several processes: two teams of threads on the cores of one machine
    # wait for each other's turns, and a copy of 80 MB then takes seconds.
    torch.set_num_threads(1)
    options = args.options
    model = Flat(options.numel, options.fragments)
    move = noise(min(p.numel() for p in model.parameters()), 11 + args.rack) * 1e-4
    begins_s = time.monotonic()
    runtime = mend.mend_init(model, args.config(fragments=options.fragments, **settings))
    init_s = time.monotonic() - begins_s
    parameters = list(model.parameters())
    began_s = time.monotonic()

    def seen_of(now: mend.Status, **more: Any) -> Seen:
        return Seen(
            rack=args.rack, at_s=time.monotonic(), step=now.step, commits=now.rounds_committed,
            merged=now.racks_merged, live=now.racks_live, stall_ms=now.stall_ms_total,
            tokens=now.tokens, tokens_merged=now.ledger.merged,
            dropped=now.rounds_missed.get("offer dropped: too old", 0), init_s=init_s,
            began_s=began_s, **more,
        )  # fmt: skip

    last: tuple[object, ...] = ()
    mend_ms = longest_ms = 0.0
    step = 0
    while not args.pipe.poll():
        step += 1
        time.sleep(step_ms / 1e3)
        parameters[step % len(parameters)].data[: move.numel()].add_(move)
        trained = time.perf_counter()
        runtime.step(tokens=tokens)
        took_ms = (time.perf_counter() - trained) * 1e3
        mend_ms, longest_ms = mend_ms + took_ms, max(longest_ms, took_ms)
        now = runtime.status()
        if (now.rounds_committed, now.racks_live) != last:
            last = (now.rounds_committed, now.racks_live)
            args.pipe.send(seen_of(now, mend_ms=mend_ms, longest_ms=longest_ms))
            longest_ms = 0.0
    now = runtime.status()
    args.pipe.send(seen_of(now, mend_ms=mend_ms, longest_ms=longest_ms, last=True))
    runtime.abort()
