"""A real cause in real time: a link whose rate falls. It is named rightly, something is done about
it, and it is taken back on relief. test_failslow.py has loaders that sleep, test_neighbours.py a
busy core.

The machine has other work: what is judged are verdicts, causes and moves, not times. How long steps
take is injected. Racks train until all of that was seen, and are killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mend.tools.keys_command import create
from mend.tools.links import INTERFACE, Link, Net, links
from tests.process.racks import Job, Nursery, until

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 16, "overlap_steps": 4, "failslow_action": "act",
    "grace_window_ms": 30_000, "failslow_min_samples": 4, "outer_optimizer_momentum": 0.0,
}  # fmt: skip
FOREVER = 1_000_000
KNOWN_ROUNDS = 16
"""By then a rack has a past: twice `failslow_min_samples` samples, and time to spare."""


def known(job: Job) -> None:
    """Wait until every rack knows how fast it and its links are."""
    for rack in range(job.racks):
        until(
            lambda rack=rack: len(job.events(rack, kind="commit")) >= KNOWN_ROUNDS,
            lambda rack=rack: f"rack {rack} merges {KNOWN_ROUNDS} rounds\n{job.stacks()}",
        )


MISSING = [program for program in ("ip", "tc") if shutil.which(program) is None]
needs_links = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not Path("/dev/net/tun").exists() or MISSING,
    reason=f"needs root on Linux with /dev/net/tun, ip and tc (missing: {MISSING})",
)


def shape(net: Net, rack: int, mbit: int) -> None:
    """What a rack sends has this rate from here on."""
    tbf = ["tbf", "rate", f"{mbit}mbit", "burst", "50000", "limit", "500000"]
    command = ["tc", "-n", net.racks[rack].namespace, "qdisc", "change", "dev", INTERFACE, "root"]
    subprocess.run([*command, *tbf], check=True)


def since(
    job: Job, since_ns: int, rack: int, kind: str, ratio: float = 0, **wanted: object
) -> dict[str, Any]:
    """Wait until a rack records such an event, of this ratio or more: before, a busy machine may
    have had verdicts of its own."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = [
            event
            for event in job.events(rack, kind=kind)
            if event["time_ns"] > since_ns
            and wanted.items() <= event.items()
            and event.get("ratio", ratio) >= ratio
        ]
        return bool(found)

    until(there, lambda: f"rack {rack} records {kind} {wanted} since {since_ns}\n{job.stacks()}")
    return found[0]


@needs_links
@pytest.mark.slow
def test_smoke_in_real_time_a_link_whose_rate_falls_is_named_and_not_waited_for(
    nursery: Nursery, tmp_path: Path
) -> None:
    """What rack 1 sends comes a fifth as fast."""
    link = Link.parse("100mbit,2ms")
    with links(link, racks=3, witness=False, measure=False) as net:
        create(tmp_path / "key", (bytes(range(32)),))
        sites = [(site.namespace, site.host) for site in net.racks]
        job = Job(
            nursery, tmp_path, [21900] * 4, racks=3, ranks=1, witness=False, name="link",
            torchrun=False, sites=[*sites, ("", "")], key_file=tmp_path / "key",
        )  # fmt: skip
        with contextlib.closing(job):
            never = job.gate("never")
            for rack in range(3):
                at = {"1": [["find", 1.0, "", never, never, True]]}
                job.start(
                    rack, steps=FOREVER, config=CONFIG, pace_ms=40.0, model="broad",
                    learning_rate=1e-6, at=at,
                )  # fmt: skip
            known(job)
            slow_ns = time.time_ns()
            shape(net, 1, 20)
            for rack in (0, 2):
                since(job, slow_ns, rack, "slow-link", ratio=2, from_rack=1, to_rack=rack)
            left = since(job, slow_ns, 0, "slow-rack-left", slow_rack=1, stage=3)
            assert "the link 1 -> " in left["reason"], left
            well_ns = time.time_ns()
            shape(net, 1, 100)
            for rack in (0, 2):
                since(job, well_ns, rack, "slow-link-over", from_rack=1, to_rack=rack)
            since(job, well_ns, 0, "slow-rack-awaited", slow_rack=1)
            assert not any(job.events(rack, kind="fail-slow") for rack in range(3)), "no step is"
