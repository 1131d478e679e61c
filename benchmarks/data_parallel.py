"""benchmarks.data_parallel: tokens per second and bytes of a job over one link, with DDP and with
mend's default settings.

    python -m benchmarks.data_parallel --link 1gbit,20ms            as root on Linux
    python -m benchmarks.data_parallel --link "" --steps 64         without a link: loopback

The job is that of benchmarks.loss: racks of one process train a byte-level GPT, and share a GPU
where there are fewer than racks. Modes, each a job of its own, in turns:

none   no exchange
mend   `mend.MendConfig()` as it comes
ddp    torch's DistributedDataParallel over gloo, between the racks

Printed as JSON: per mode the tokens per second of all racks (each repeat, median), and the bytes
that one rack sends per step, read from its network interface, so with headers (null without a
link). The first quarter of the steps is not measured, in which kernels are compiled; mend's last
round at the end of a job is not either, as it is paid once. A job of ddp makes an eighth of the
steps, as all of them wait for the link alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mend
from benchmarks import loss
from benchmarks._common import machine
from mend.determinism import weight_digest
from mend.tools.links import INTERFACE

MODES = ("none", "mend", "ddp")
DDP_SHARE = 8
LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=120)


def meet(folder: Path, rack: int, racks: int) -> None:
    """Form a gloo group of all racks, over the link where there is one."""
    host = os.environ.get("MEND_ADVERTISE_HOST", LOOPBACK)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if host == LOOPBACK else INTERFACE
    place = folder / "store.json"
    if rack == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        written = place.with_suffix(".new")
        written.write_text(json.dumps([host, store.port]))
        written.rename(place)
    else:
        until = time.monotonic() + TIMEOUT.total_seconds()
        while not place.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"rack 0 did not write {place}")
            time.sleep(0.05)
        host, port = json.loads(place.read_text())
        store = dist.TCPStore(host, port, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rack, world_size=racks, timeout=TIMEOUT)


def bytes_sent() -> int | None:
    """What this rack's interface has sent; None without a link."""
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else None


def train_rack(options: argparse.Namespace) -> None:
    """Be one rack of a job; write its result."""
    number, folder = int(os.environ["MEND_RACK"]), Path(options.rank)
    rack = loss.Rack(options, 0, number)
    with ExitStack() as job:
        if options.mode == "mend":
            runtime = job.enter_context(mend.session(rack.model, optimizer=rack.optimizers))
        elif options.mode == "ddp":
            meet(folder, number, options.racks)
            job.callback(dist.destroy_process_group)
            rack.model = nn.parallel.DistributedDataParallel(rack.model)
        warm_up = options.steps // 4
        for step in range(options.steps):
            if step == warm_up:
                began, sent = _now(), bytes_sent()
            rack.step(step, [number])
        seconds, now = _now() - began, bytes_sent()
    steps = options.steps - warm_up
    told = {
        "tokens_per_s": steps * rack.size.batch * rack.size.context / seconds,
        "device": loss.device_name(),
        "bytes_per_step": None if sent is None or now is None else (now - sent) / steps,
        "outcome": runtime.status().outcome if options.mode == "mend" else "",
        "weights": weight_digest(rack.model),
    }  # fmt: skip
    (folder / f"{number}.json").write_text(json.dumps(told))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def run_job(options: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    """Run one job of this mode; return what its racks measured."""
    steps = options.steps // (DDP_SHARE if mode == "ddp" else 1)
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            sys.executable, "-m", "mend.tools", "launch", "--racks", str(options.racks),
            "--no-witness", *(["--link", options.link] if options.link else []),
            __file__, f"--rank={folder}", "--mode", mode, "--racks", str(options.racks),
            "--steps", str(steps), "--size", options.size,
        ]  # fmt: skip
        subprocess.run(
            argv, check=True, env=loss.environment(options.racks), stdout=subprocess.DEVNULL
        )
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("[0-9]*.json"))]
    if len(told) != options.racks or {each["outcome"] for each in told} - {"", "merged"}:
        raise RuntimeError(f"a job of {mode} ended {told}")
    if (len({each["weights"] for each in told}) == 1) == (mode == "none"):
        raise RuntimeError(f"racks that exchange must end with equal weights, in {mode}: {told}")
    return told


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run all modes in turns, and return their rates."""
    runs: dict[str, list[list[dict[str, Any]]]] = {mode: [] for mode in MODES}
    for repeat in range(options.repeats):
        for mode in MODES if repeat % 2 == 0 else MODES[::-1]:
            runs[mode].append(run_job(options, mode))
            print(f"repeat {repeat}, {mode}: {rate(runs[mode][-1])}", file=sys.stderr)
    rates = {mode: [rate(told) for told in runs[mode]] for mode in MODES}
    plain = statistics.median(rates["none"])
    found = {
        mode: {
            "tokens_per_s": rates[mode],
            "of_none": round(statistics.median(rates[mode]) / plain, 3),
            "bytes_per_step": runs[mode][-1][0]["bytes_per_step"],
        }
        for mode in MODES
    }
    return {
        "name": "data_parallel", "link": options.link, "size": options.size,
        "racks": options.racks, "steps": options.steps,
        "device": runs["none"][0][0]["device"], "modes": found, "machine": machine(),
    }  # fmt: skip


def rate(told: list[dict[str, Any]]) -> int:
    """Tokens per second of all racks together; each at its own pace."""
    return round(sum(each["tokens_per_s"] for each in told))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", default="1gbit,20ms", help='RATE,RTT; "" for loopback')
    parser.add_argument("--racks", type=int, default=2)
    parser.add_argument("--size", choices=loss.SIZES, default="5M")
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank and options.steps < 4 * DDP_SHARE:
        parser.error(f"--steps must be at least {4 * DDP_SHARE}")
    options.inner, options.peak, options.start = "adamw", loss.PEAK, "scratch"
    if options.rank:
        train_rack(options)
        return
    text = json.dumps(compare(options), indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
