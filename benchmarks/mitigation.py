"""benchmarks.mitigation: the throughput that is left if a rack becomes slow. Prints a table.

    python -m benchmarks.mitigation --save
    python -m benchmarks.mitigation --causes link --save      as root, with /dev/net/tun, ip and tc

Three racks; after `--healthy` steps rack 2 becomes slow by `--factor`, for `--seconds`. A step is 8
micro-batches. By what it becomes slow (`--causes`):

    compute  busy processes on its cores, as many as leave it 1 / `--factor` of them
    input    its loader sleeps before the forward, so that a step takes `--factor` times as long
    link     what it sends has 1 / `--factor` of the rate (`--mbit`): tbf in network namespaces
    sleep    as input, but no rack computes: a step is a sleep of `--step-ms`

But for sleep, racks train a small GPT (1 thread each, `--cores` cores each). Two jobs: in lockstep,
and with a grace window of 30 s. What is done:

    nothing         failslow_action="validate"
    not waited for  "act", and the script does not ask: rounds stop waiting for rack 2 (rung 3)
    local_batch     "act", and the script asks: rack 2 takes fewer micro-batches (rung 2)
    oracle          nothing, but the script of rack 2 takes 8 / factor of them from that step on;
                    of a slow link: rounds do not wait for rack 2 (expected_racks)

Tokens (micro-batches of all racks) and rounds per second, in percent of those before the onset: of
the whole time after it, in which the rack has to be found, and of the last third. No rack can do
more than its share: `ideal` tokens are (2 + 1 / factor) / 3, of a slow link all. `found`: the first
verdict on rack 2, so many steps after the onset, and the cause that was named.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks._common import RackArgs, racks, read_options, with_options
from mend import mend_init
from mend.errors import MendError
from mend.tools.demo_model import BYTES, SIZES, ByteGPT, loss_of
from mend.tools.links import INTERFACE, Link, Net, links

RACKS, SLOW, WHOLE = 3, 2, 8
WIDTH = 32
FRAGMENTS, PERIOD, OVERLAP = 2, 16, 4
GRACE_MS = 30_000.0
GIVE_UP_S = 30.0
"""In lockstep the first rack that stops ends the others."""

CLONE_NEWNET = 0x40000000
BUSY = "import os; os.sched_setaffinity(0, {cores})\nwhile os.getppid() == {parent}: pass"

JOBS: dict[str, dict[str, Any]] = {
    "lockstep": {"lockstep": True, "wait_timeout_s": GIVE_UP_S},
    "grace 30 s": {"grace_window_ms": GRACE_MS},
}
ARMS = ("nothing", "not waited for", "local_batch", "oracle")
OPTIONS = {
    "causes": ("compute,input", "what makes the rack slow"),
    "factor": (4.0, "times slower"),
    "healthy": (80, "steps before"),
    "seconds": (15.0, "after it"),
    "step_ms": (50.0, "of cause sleep"),
    "size": (("small", *sorted(set(SIZES) - {"small"})), "of the model"),
    "cores": (2, "of each rack"),
    "mbit": (100, "of cause link"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """State of a rack after a step. `at_s` is time.monotonic. `found`: the cause of a verdict on
    rack 2 in force, empty: there is none."""

    at_s: float
    taken: int
    rounds: int
    found: str = ""


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second."""

    tokens: float
    rounds: float


def main() -> None:
    options = read_options("mitigation", __doc__, OPTIONS)
    print("\n".join(_head(options)))
    rows = []
    for cause, job, arm in arms(options.causes.split(",")):
        rows.append(row_of((cause, job, arm), _run_job(options, cause, job, arm), options))
        print(rows[-1], flush=True)
    if options.save:
        with open(_result(options.causes), "w", encoding="utf-8") as file:
            file.write("\n".join([*_head(options), *rows]) + "\n")


def arms(causes: list[str]) -> list[tuple[str, str, str]]:
    """Return the arms. In lockstep every round waits for every rack; fewer micro-batches help no
    link."""
    return [
        (cause, job, arm)
        for cause in causes
        for job in JOBS
        for arm in ARMS
        if (job, arm) != ("lockstep", ARMS[1])
        and (cause != "link" or (job != "lockstep" and arm != "local_batch"))
    ]


def _result(causes: str) -> str:
    """A table for each set of causes."""
    more = "" if causes == "sleep" else "_" + causes.replace(",", "_")
    return f"benchmarks/results/mitigation{more}.md"


def _head(options: argparse.Namespace) -> list[str]:
    ideal = 100 * (RACKS - 1 + 1 / options.factor) / RACKS
    return [
        "# A rack becomes slow: what is left of the job's throughput",
        "",
        f"`python -m benchmarks.mitigation {' '.join(sys.argv[1:])}`. Three racks, one of them "
        f"{options.factor:g} times slower from step {options.healthy} on; percent of the tokens "
        f"and rounds per second before. Of tokens {ideal:.0f} % are what the racks can do (of a "
        f"slow link all). H {PERIOD}, P {FRAGMENTS}, tau {OVERLAP}; {os.cpu_count()} cores. One "
        "run each.",
        "",
        "| cause | job | what is done | tokens/s | rounds/s | last third: tokens/s | rounds/s "
        "| found |",
        "|---|---|---|---|---|---|---|---|",
    ]


def row_of(
    arm: tuple[str, str, str], seen: dict[int, list[Step]], options: argparse.Namespace
) -> str:
    """`arm`: cause, job, what is done."""
    onset_s = seen[SLOW][options.healthy - 1].at_s
    begun_s = max(each[0].at_s for each in seen.values())
    end_s = min(onset_s + options.seconds, *(each[-1].at_s for each in seen.values()))
    before = rates(seen, begun_s, onset_s)
    cells = []
    for since_s in (onset_s, end_s - (end_s - onset_s) / 3):
        found = rates(seen, since_s, end_s)
        cells += [100 * found.tokens / before.tokens, 100 * found.rounds / before.rounds]
    shown = [f"{cell:.0f} %" for cell in cells]
    return "| " + " | ".join([*arm, *shown, _verdict(seen, options.healthy)]) + " |"


def _verdict(seen: dict[int, list[Step]], healthy: int) -> str:
    """Steps until rack 2 itself (of a slow link: rack 0) had the first verdict, and all causes."""
    late = {rack: each[healthy:] for rack, each in seen.items()}
    causes = sorted({step.found for each in late.values() for step in each if step.found})
    steps = [n for rack in (SLOW, 0) for n, step in enumerate(late[rack], start=1) if step.found]
    return f"{steps[0]} steps: {', '.join(causes)}" if steps else "no"


def rates(seen: dict[int, list[Step]], since_s: float, until_s: float) -> Rates:
    """Return the rates of steps that ended in this time, and of rounds as rack 0 saw them."""
    tokens = sum(
        each.taken for mine in seen.values() for each in mine if since_s < each.at_s <= until_s
    )
    rounds = [each.rounds for each in seen[0] if since_s < each.at_s <= until_s]
    made = rounds[-1] - rounds[0] if rounds else 0
    return Rates(tokens / (until_s - since_s), made / (until_s - since_s))


def _run_job(options: argparse.Namespace, cause: str, job: str, arm: str) -> dict[int, list[Step]]:
    one = with_options(options, cause=cause, job=job, arm=arm)
    with _network(one), racks(_rack, one, RACKS) as pipes:
        return {rack: pipe.recv() for rack, pipe in enumerate(pipes)}


@contextlib.contextmanager
def _network(options: argparse.Namespace) -> Iterator[None]:
    """Make a network namespace for each rack, `options.net`, if a link is the cause."""
    options.net = None
    if options.cause != "link":
        yield
        return
    link = Link.parse(f"{options.mbit}mbit,2ms")
    with links(link, racks=RACKS, witness=False, measure=False) as options.net:
        yield


# ------------------------------------------------------------------ in the process of a rack


class Work:
    """The training of a rack, and its slowdown."""

    def __init__(self, args: RackArgs) -> None:
        self.options, self.rack = args.options, args.rack
        self.sleeps = self.options.cause == "sleep"
        self.size = SIZES[self.options.size]
        self.slower = 1.0
        self.healthy_s = self.options.step_ms / 1e3 if self.sleeps else 0.0
        """Healthy time of a step."""
        self.cores = _cores_of(args.rack, self.options.cores)
        os.sched_setaffinity(0, self.cores)  # before any thread of torch or mend
        torch.set_num_threads(1)
        torch.manual_seed(args.rack)
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.model: nn.Module = plain if self.sleeps else ByteGPT(self.size)
        self._neighbours: list[subprocess.Popen[bytes]] = []

    def become_slow(self, healthy_s: float) -> None:
        """`healthy_s`: what a step took so far."""
        if self.rack != SLOW:
            return
        options, self.slower = self.options, self.options.factor
        self.healthy_s = self.healthy_s or healthy_s
        if options.cause == "compute":
            code = BUSY.format(cores=self.cores, parent=os.getpid())
            count = round((options.factor - 1) * len(self.cores))
            self._neighbours = [
                subprocess.Popen([sys.executable, "-ISc", code], start_new_session=True)
                for _ in range(count)
            ]
        elif options.cause == "link":
            shape = ["rate", f"{options.mbit / options.factor:g}mbit"]
            shape += ["burst", "50000", "limit", "500000"]
            command = ["tc", "qdisc", "change", "dev", INTERFACE, "root", "tbf", *shape]
            subprocess.run(command, check=True)

    def load(self, taken: int) -> None:
        """Wait as so many micro-batches need, where the cause is sleep or input."""
        times = self.slower if self.sleeps else self.slower - 1
        if self.options.cause in ("sleep", "input"):
            time.sleep(self.healthy_s * times * taken / WHOLE)

    def train(self, taken: int) -> None:
        if self.sleeps:
            self.model(torch.randn(8, WIDTH)).square().mean().backward()
            return
        for _ in range(taken):
            text_BT1 = torch.randint(BYTES, (self.size.batch, self.size.context + 1))
            (loss_of(self.model, text_BT1) / taken).backward()

    def close(self) -> None:
        for process in self._neighbours:
            process.kill()
            process.wait()


def _cores_of(rack: int, count: int) -> set[int]:
    """Cores of this rack alone, where the machine has so many."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[(rack * count + n) % len(cores)] for n in range(count)}


def _join(net: Net | None, rack: int) -> dict[str, Any]:
    """Enter the network of this rack; the settings that go with it."""
    if net is None:
        return {}
    opened = os.open(f"/run/netns/{net.racks[rack].namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(opened, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    os.close(opened)
    peers = {r: f"tcp://{site.host}:21900" for r, site in enumerate(net.racks)}
    return {"sideband_peers": peers, "insecure": True}  # nobody else is in these namespaces


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    rounds = {"fragments": FRAGMENTS, "sync_period_steps": PERIOD, "overlap_steps": OVERLAP}
    action = "act" if options.arm in ("not waited for", "local_batch") else "validate"
    known = options.cause == "link" and options.arm == "oracle"
    expected = {"expected_racks": (0, 1)} if known else {}
    return {**rounds, **JOBS[options.job], "failslow_action": action, **expected}


def _rack(args: RackArgs) -> None:
    """The process of a rack: so many steps, then for so many seconds."""
    options, net = args.options, _join(args.options.net, args.rack)
    work = Work(args)
    optimizer = torch.optim.SGD(work.model.parameters(), lr=1e-3)
    config = args.config(**_settings(options), **net)
    runtime = mend_init(work.model, config, optimizer)
    seen, end_s, begun_s = list[Step](), float("inf"), time.monotonic()
    try:
        while time.monotonic() < end_s:
            if len(seen) == options.healthy:
                end_s = time.monotonic() + options.seconds
                work.become_slow((time.monotonic() - begun_s) / options.healthy)
            taken = WHOLE
            if options.arm == "local_batch":
                taken = runtime.local_batch(WHOLE)
            elif options.arm == "oracle" and work.slower > 1 and options.cause != "link":
                taken = max(1, round(WHOLE / work.slower))
            work.load(taken)
            work.train(taken)
            runtime.count_tokens(taken)
            optimizer.step()
            optimizer.zero_grad()
            status = runtime.status()
            found = [slow.cause or "not validated" for slow in status.slow if slow.rack == SLOW]
            seen.append(Step(time.monotonic(), taken, status.rounds_committed, "".join(found[:1])))
    except MendError:  # in lockstep another rack has ended
        pass
    finally:
        work.close()
    args.pipe.send(seen)
    runtime.abort()


if __name__ == "__main__":
    main()
