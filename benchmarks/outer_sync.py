"""benchmarks.outer_sync: one blocking outer step against a raw gloo all-reduce. Prints one JSON
object.

    python -m benchmarks.outer_sync --numel 50331648 --repeats 15
    python -m benchmarks.outer_sync --fragments 4

Two processes on loopback, one torch thread each. In every repeat they take turns: one all_reduce
(sum, fp32) of `numel` elements by gloo, then one step of mend that captures the whole model,
exchanges it, merges, digests, decides by quorum and applies (lockstep, sync_period_steps=1, no
overlap). A barrier before each; the time of a turn is that of the slower rack.

`measured` is the median over repeats of mend / gloo. `breakdown_ms` cuts the step of rack 0 into
what follows what (medians; of several fragments, which overlap, it gives the time spent on each
kind):

encode    the model into the snapshot, anchor - snapshot, check, checksum
                                                  (training thread, pool)
exchange  what is left then of the pull of the other rack's offer, which begins with the encoding
                                                  (lane threads)
gather    offers are announced, members fixed     (control plane)
merge     mean, outer step, digest of the result  (worker; `digest` is the digest's part of it,
          but for what a compiled merge makes on the way)
decide    both hold it, both accepted the commit  (control plane)
apply     the new anchor into the model           (training thread)

`cpu_ms` is rack 0's CPU time, which other load on the machine disturbs less: of all threads for
both, and of mend's by part; `rest` is lane, control plane, interpreter, and what the threads that
share capture, encode and merge do of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mend
from benchmarks._common import (
    Flat,
    Goal,
    RackArgs,
    limit,
    noise,
    racks,
    ratios,
    read_options,
    report,
    spread,
)
from mend.engine.compute.digest import StateDigest
from mend.engine.loop.pulls_ahead import PullsAhead
from mend.engine.trainer.trainer_rounds import TrainerRounds

GOAL = Goal("<= 1.3 x gloo all_reduce", 1.3, "x gloo")
TURNS = ("gloo", "mend")
OPTIONS = {
    "numel": (50_331_648, "fp32 elements; 50331648 are 201 MB"),
    "fragments": (1, "P"),
    "momentum": (0.0, "of the outer step"),
    "repeats": (15, "turns of both; one more warms up"),
    "apart": (0, "1: an offer is encoded after its capture, and pulled after its announcement"),
}
WORK = ("capture", "merge", "apply")
ORDER = ("encode", "exchange", "gather", "merge", "decide", "apply")


def main() -> None:
    options = read_options("outer_sync", __doc__, OPTIONS)
    with racks(_rack, options) as pipes:
        found = [pipe.recv() for pipe in pipes]
    gloo, sync, times = against_gloo(found, "mend")
    assert len({f["digest"] for f in found}) == 1, "the racks differ"
    plain = limit("gloo all_reduce", "ms", [1e3 * s for s in gloo], 1)
    more = {
        "gloo_ms": spread([1e3 * s for s in gloo], 1),
        "mend_ms": spread([1e3 * s for s in sync], 1),
        "breakdown_ms": _medians(found[0]["parts"], (*ORDER, "digest")),
        "cpu_ms": _cpu(found[0]),
    }
    report("outer_sync", GOAL, times, options, plain, more)


def against_gloo(racks: Sequence[Mapping[str, list[float]]], ours: str) -> tuple[list[float], ...]:
    """Seconds of gloo's turns and of `ours`, each of the slower rack, and their ratios."""
    gloo, sync = (
        [max(turn) for turn in zip(*(rack[key] for rack in racks), strict=True)]
        for key in ("gloo", ours)
    )
    return gloo, sync, ratios(sync, gloo)


def _medians(parts: list[dict[str, float]], names: Sequence[str]) -> dict[str, float]:
    return {name: round(1e3 * statistics.median(p[name] for p in parts), 1) for name in names}


def _cpu(found: dict[str, Any]) -> dict[str, float]:
    whole = {name: round(1e3 * statistics.median(found[f"{name}_cpu"]), 1) for name in TURNS}
    parts = _medians(found["cpu"], WORK)
    return {**whole, **parts, "rest": round(whole["mend"] - sum(parts.values()), 1)}


# ------------------------------------------------------------------ a rack


def _rack(args: RackArgs) -> None:
    torch.set_num_threads(1)
    options = args.options
    group = gloo_of(args)
    model = Flat(options.numel, options.fragments)
    config = args.config(
        fragments=options.fragments,
        sync_period_steps=1,
        overlap_steps=0,
        concurrent_outer_step=False,
        lockstep=True,
        outer_optimizer_momentum=options.momentum,
    )
    moves = [noise(p.numel(), 11 + args.rack) * 1e-3 for p in model.parameters()]
    buffer = torch.empty(options.numel)
    if options.apart:
        _keep_apart()
    runtime = mend.mend_init(model, config)
    watch = Watch(runtime)
    keys = ("gloo", "mend", "gloo_cpu", "mend_cpu", "parts", "cpu")
    found: dict[str, Any] = {key: [] for key in keys}

    def all_reduce() -> None:
        group.allreduce([buffer]).wait()

    for repeat in range(options.repeats + 1):
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.data.add_(move)
        buffer.fill_(1.0)
        turns = [("gloo", all_reduce), ("mend", lambda: runtime.step(tokens=1))]
        for name, turn in turns if repeat % 2 else reversed(turns):
            taken, cpu = time_turn(group, turn)
            if repeat:
                found[name].append(taken)
                found[f"{name}_cpu"].append(cpu)
        if repeat:
            found["parts"].append(watch.parts())
            found["cpu"].append(dict(watch.cpu))
        watch.clear()
    found["digest"] = runtime.anchor_digest()
    mend.mend_shutdown(model)
    args.pipe.send(found)


def _keep_apart() -> None:
    """For comparison: stages that wait for each other. `exchange` then includes the encoding."""
    TrainerRounds._waits_for_result = lambda self: False  # type: ignore[method-assign]
    PullsAhead.begin = lambda *_: None  # type: ignore[method-assign]


def time_turn(group: Any, turn: Callable[[], None]) -> tuple[float, float]:
    """(wall, CPU of all threads of this process), seconds."""
    group.allreduce([torch.zeros(1)]).wait()  # the barrier
    started, worked = time.perf_counter(), time.process_time()
    turn()
    return time.perf_counter() - started, time.process_time() - worked


def gloo_of(args: RackArgs) -> Any:
    """A bare group: a default group would make mend take the racks for ranks of one rack."""
    store = dist.FileStore(str(Path(args.folder) / "gloo"), 2)
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = [device], 2, timedelta(seconds=120)
    return dist.ProcessGroupGloo(store, args.rack, 2, options)


class Watch:
    """Stamps what a rank does, by wrapping the calls between its threads."""

    def __init__(self, runtime: Any) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self.cpu = dict.fromkeys(WORK, 0.0)
        self._feeds: list[float] = []
        live = runtime._rank
        self._wrap(runtime, "step", "step")
        self._wrap(live.trainer, "_capture", "capture")
        self._wrap(live.trainer.model, "_move", "apply")
        self._wrap(live.published, "publish", "publish")
        self._wrap(live.numerics, "merge", "merge")
        for pull in ("fetch", "pull_ahead"):
            self._wrap_pull(live.rank.host, pull)
        self._wrap_digest()

    def clear(self) -> None:
        self._spans.clear()
        self._feeds.clear()
        self.cpu = dict.fromkeys(WORK, 0.0)

    def parts(self) -> dict[str, float]:
        """Seconds of each part of the step just made."""
        spans = self._spans
        first = {name: min(start for start, _ in spans[name]) for name in spans}
        last = {name: max(stop for _, stop in spans[name]) for name in spans}
        busy = {
            name: sum(stop - start for start, stop in spans[name]) for name in ("capture", "merge")
        }
        here = max(last["exchange"], last["capture"])
        return {
            "encode": busy["capture"],
            "exchange": here - last["capture"],
            "gather": max(0.0, first["merge"] - here),
            "merge": busy["merge"],
            "decide": last["publish"] - last["merge"],
            "apply": last["step"] - last["publish"],
            "digest": sum(self._feeds),
        }

    def _add(self, name: str, start: float) -> None:
        self._spans.setdefault(name, []).append((start, time.perf_counter()))

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        start, worked = time.perf_counter(), time.thread_time()
        try:
            return call()
        finally:
            self._add(name, start)
            if name in self.cpu:
                self.cpu[name] += time.thread_time() - worked

    def _wrap(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def outer(*args: Any, **kwargs: Any) -> Any:
            return self._timed(name, lambda: inner(*args, **kwargs))

        setattr(owner, method, outer)

    def _wrap_pull(self, host: Any, method: str) -> None:
        inner = getattr(host, method)

        def pull(*args: Any, **more: Any) -> None:
            start = time.perf_counter()
            at = next(i for i, arg in enumerate(args) if callable(arg))
            done = args[at]

            def timed(error: Exception | None) -> None:
                self._add("exchange", start)
                done(error)

            inner(*args[:at], timed, *args[at + 1 :], **more)

        setattr(host, method, pull)

    def _wrap_digest(self) -> None:
        inner, feeds = StateDigest.feed, self._feeds

        def feed(digest: StateDigest, *args: Any) -> None:
            start = time.perf_counter()
            inner(digest, *args)
            feeds.append(time.perf_counter() - start)

        StateDigest.feed = feed  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
