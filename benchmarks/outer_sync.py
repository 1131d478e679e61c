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

capture   the model into the snapshot             (training thread)
encode    anchor - snapshot, check, checksum      (worker)
announce  offer to the other rack                 (control plane)
exchange  pull of the other rack's offer          (lane threads)
gather    members are fixed                       (control plane)
merge     mean, outer step, digest of the result  (worker; `digest` is the digest's part of it)
decide    both hold it, both accepted the commit  (control plane)
apply     the new anchor into the model           (training thread)

`cpu_ms` is rack 0's CPU time, which other load on the machine disturbs less: of all threads for
both, and of mend's by part; `rest` is lane, control plane, interpreter, and what the threads that
share capture, encode and merge do of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mend
from benchmarks._common import Flat, RackArgs, arguments, limit, noise, racks, report, spread
from mend.engine.digest import StateDigest

GOAL = 2.0
STRETCH = 1.5
TURNS = ("gloo", "mend")
WORK = ("capture", "encode", "merge", "apply")
ORDER = ("capture", "encode", "announce", "exchange", "gather", "merge", "decide", "apply")


def main() -> None:
    options = _options()
    with racks(_rack, options) as pipes:
        found = [pipe.recv() for pipe in pipes]
    gloo, sync = ([max(both) for both in zip(*(f[key] for f in found), strict=True)]
                  for key in TURNS)  # fmt: skip
    ratios = [ours / raw for ours, raw in zip(sync, gloo, strict=True)]
    assert len({f["digest"] for f in found}) == 1, "the racks differ"
    report(
        "outer_sync",
        goal=f"<= {GOAL} x gloo all_reduce (stretch {STRETCH})",
        values=ratios,
        passed=statistics.median(ratios) <= GOAL,
        options=options,
        unit="x gloo",
        beside=limit("gloo all_reduce", "ms", [1e3 * s for s in gloo], 1),
        more={
            "gloo_ms": spread([1e3 * s for s in gloo], 1),
            "mend_ms": spread([1e3 * s for s in sync], 1),
            "breakdown_ms": _medians(found[0]["parts"], (*ORDER, "digest")),
            "cpu_ms": _cpu(found[0]),
        },
    )


def _options() -> argparse.Namespace:
    parser = arguments("outer_sync", __doc__)
    parser.add_argument(
        "--numel", type=int, default=50_331_648, help="fp32 elements (default 50331648 = 201 MB)"
    )
    parser.add_argument("--fragments", type=int, default=1, help="P (default 1)")
    parser.add_argument("--momentum", type=float, default=0.0, help="of the outer step (default 0)")
    parser.add_argument(
        "--repeats", type=int, default=15, help="turns of both; one more warms up (default 15)"
    )
    return parser.parse_args()


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
            taken, cpu = timed(group, turn)
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


def timed(group: Any, turn: Callable[[], None]) -> tuple[float, float]:
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
        trainer, rank, published = (
            runtime._rank.trainer,
            runtime._rank.rank,
            runtime._rank.published,
        )
        self._wrap(runtime, "step", "step")
        self._wrap(trainer, "_capture", "capture")
        self._wrap(trainer, "_move", "apply")
        self._wrap(published, "publish", "publish")
        for work in ("encode", "merge"):
            self._wrap(rank.numerics, work, work)
        self._wrap_fetch(rank.host)
        self._wrap_digest()

    def clear(self) -> None:
        self._spans.clear()
        self._feeds.clear()
        self.cpu = dict.fromkeys(WORK, 0.0)

    def parts(self) -> dict[str, float]:
        """Seconds of each part of the step just made."""
        spans = self._spans
        ((_, ended),) = spans["step"]
        first, last = min, max
        capture_end = last(stop for _, stop in spans["capture"])
        encoded = last(stop for _, stop in spans["encode"])
        pulled = first(start for start, _ in spans["exchange"])
        arrived = last(stop for _, stop in spans["exchange"])
        merging = first(start for start, _ in spans["merge"])
        merged = last(stop for _, stop in spans["merge"])
        published = last(stop for _, stop in spans["publish"])
        busy = {
            name: sum(stop - start for start, stop in spans[name])
            for name in ("capture", "encode", "exchange", "merge")
        }
        return {
            **busy,
            "announce": max(0.0, pulled - max(encoded, capture_end)),
            "gather": max(0.0, merging - arrived),
            "decide": published - merged,
            "apply": ended - published,
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

    def _wrap_fetch(self, host: Any) -> None:
        inner = host.fetch

        def fetch(*args: Any) -> None:
            start, done = time.perf_counter(), args[-1]

            def timed(error: Exception | None) -> None:
                self._add("exchange", start)
                done(error)

            inner(*args[:-1], timed)

        host.fetch = fetch

    def _wrap_digest(self) -> None:
        inner, feeds = StateDigest.feed, self._feeds

        def feed(digest: StateDigest, *args: Any) -> None:
            start = time.perf_counter()
            inner(digest, *args)
            feeds.append(time.perf_counter() - start)

        StateDigest.feed = feed  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
