"""benchmarks.hooks: the cost of mend in a step in which nothing is due. Prints one JSON object.

    python -m benchmarks.hooks --steps 300 --blocks 300

Two racks on loopback, each with its loop, its heartbeats and its connections; the period is so long
that no round comes. One of them steps the same optimizer in blocks of `steps`, in turn with mend's
hooks and without them (taken out of torch's tables of global hooks, and put back). The parameters
are few and small, so that a step is short and the hook's share of it can be seen.

`measured` is the median over pairs of blocks of the difference, in microseconds per step, in
lockstep, where no step polls. `poll_us` is the same in a job without lockstep that polls after
every step and finds nothing, with the fragments of the defaults, as many parameters, and a rack of
one process. `ledger_us` is as `measured`, where a DataLedger gives the step ROWS rows and the
script counts them, against a range of numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as optim

import mend
from benchmarks._common import (
    Flat,
    Goal,
    RackArgs,
    limit,
    racks,
    read_options,
    report,
    spread,
    spreads,
    with_options,
)
from mend.config.settings import MendConfig

GOAL = Goal("<= 3 us per step, <= 15 us with a poll that finds nothing", 3.0, "us", digits=2)
POLL_GOAL_US = 15.0
PERIOD_STEPS = 1_000_000_000
ROWS = 8
FRAGMENTS = MendConfig.fragments
SETTINGS: dict[str, dict[str, Any]] = {
    "quiet": {"lockstep": True, "overlap_steps": 4, "fragments": 1},
    "poll": {"overlap_steps": 4, "fragments": FRAGMENTS},
    "ledger": {"lockstep": True, "overlap_steps": 4, "fragments": 1},
}
"""By what is measured. A rack that is not in lockstep polls."""
OPTIONS = {
    "steps": (300, "steps of a block"),
    "blocks": (300, "pairs of blocks; one more warms up"),
}


def main() -> None:
    options = read_options("hooks", __doc__, OPTIONS)
    took = {kind: _run(with_options(options, kind=kind)) for kind in SETTINGS}
    extra = {kind: _differences(step_us) for kind, step_us in took.items()}
    plain = limit("the same step without mend", "us", took["quiet"]["without"], 2)
    more = {"step_us": spreads(took["quiet"], 2), "poll_us": spread(extra["poll"], 2)}
    more["ledger_us"] = spread(extra["ledger"], 2)
    met = statistics.median(extra["poll"]) <= POLL_GOAL_US
    report("hooks", GOAL, extra["quiet"], options, plain, more, also=met)


def _run(options: argparse.Namespace) -> dict[str, list[float]]:
    with racks(_rack, options) as pipes:
        step_us: dict[str, list[float]] = pipes[0].recv()
        for pipe in pipes:
            pipe.send("end")
    return step_us


def _differences(step_us: dict[str, list[float]]) -> list[float]:
    return [a - b for a, b in zip(step_us["with"], step_us["without"], strict=True)]


def _rack(args: RackArgs) -> None:
    torch.set_num_threads(1)
    settings = SETTINGS[args.options.kind]
    model = Flat(16, settings["fragments"])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    count = ROWS * args.options.steps * (args.options.blocks + 1)
    ledger = mend.DataLedger(4 * count) if args.options.kind == "ledger" else None
    config = args.config(sync_period_steps=PERIOD_STEPS, **settings)
    runtime = mend.mend_init(model, config, optimizer, ledger=ledger)
    if args.rack == 0:
        step = {"with": optimizer.step, "without": optimizer.step}
        if ledger is not None:
            given, numbers = iter(ledger), iter(range(count))
            step["with"] = partial(_step, optimizer, given, runtime)
            step["without"] = partial(_step, optimizer, numbers, None)
        args.pipe.send(_measure(step, args.options))
    elif ledger is not None:
        _ = ledger.epoch  # in lockstep no rack gets rows before all have asked
    args.pipe.recv()
    mend.mend_shutdown(model)


def _step(
    optimizer: torch.optim.Optimizer, rows: Iterator[int], runtime: mend.Runtime | None
) -> None:
    for _ in range(ROWS):
        next(rows)
    if runtime is not None:
        runtime.count_rows(ROWS)
    optimizer.step()


def _measure(step: dict[str, Callable[[], object]], options: Any) -> dict[str, list[float]]:
    """Microseconds per step of every block."""
    tables = [optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks]
    ours = [dict(table) for table in tables]
    assert [len(hooks) for hooks in ours] == [1, 1], "mend has one hook before and one after"
    step_us: dict[str, list[float]] = {"with": [], "without": []}
    for block in range(options.blocks + 1):
        for name in ("with", "without") if block % 2 else ("without", "with"):
            for table, hooks in zip(tables, ours, strict=True):
                table.clear()
                table.update(hooks if name == "with" else {})
            taken_us = _block(step[name], options.steps)
            if block:
                step_us[name].append(taken_us)
    for table, hooks in zip(tables, ours, strict=True):
        table.update(hooks)
    return step_us


def _block(step: Callable[[], object], steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) * 1e6 / steps


if __name__ == "__main__":
    main()
