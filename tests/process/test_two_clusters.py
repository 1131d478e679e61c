"""Two clusters that reach each other through a proxy at their border only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mend.tools.keys_command import create
from tests.process.racks import Job, Nursery, environment

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "lockstep": True,
}  # fmt: skip
PROXY_PORT, DATA_PORT = 1080, 22000
needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs root on Linux with ip",
)


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@contextlib.contextmanager
def clusters() -> Iterator[list[tuple[str, str, str]]]:
    """(namespace, its address, the border's address there) of two networks without a route to each
    other: each reaches its border, and the border reaches both."""
    made, links, tag = [], list[str](), os.getpid() % 10_000
    try:
        for number in range(2):
            name, net = f"mend{tag}-{number}", f"10.{97 + number}.{tag % 250}"
            outside, inside = f"mo{tag}-{number}", f"mi{tag}-{number}"
            ip("netns", "add", name)
            made.append((name, f"{net}.2", f"{net}.1"))
            ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            links.append(outside)
            ip("addr", "add", f"{net}.1/24", "dev", outside)
            ip("link", "set", outside, "up")
            ip("-n", name, "addr", "add", f"{net}.2/24", "dev", inside)
            ip("-n", name, "link", "set", inside, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for outside in links:  # at once; a namespace takes its links with it later
            ip("link", "del", outside, check=False)
        for name, _, _ in made:
            ip("netns", "del", name, check=False)


@contextlib.contextmanager
def proxy(host: str, log: Path) -> Iterator[None]:
    log.touch()
    command = [sys.executable, "-m", "tests.process.socks_server", host, str(PROXY_PORT), str(log)]
    running = subprocess.Popen(command, env=environment())
    try:
        yield
    finally:
        running.kill()
        running.wait()


@needs_namespaces
@pytest.mark.parametrize("ranks", [1, 2])
def test_racks_of_two_clusters_meet_through_a_socks_proxy(
    nursery: Nursery, tmp_path: Path, ranks: int
) -> None:
    """Every rank's data port had to be reachable from the other cluster; now the proxy's has."""
    create(tmp_path / "key", (bytes(range(32)),))
    with contextlib.ExitStack() as stack:
        sites = stack.enter_context(clusters())
        logs = [tmp_path / f"proxy{rack}.txt" for rack in range(2)]
        for (_, _, border), log in zip(sites, logs, strict=True):
            stack.enter_context(proxy(border, log))
        job = Job(
            nursery, tmp_path, [21900, 21900, 21899, 29500, 29501], racks=2, ranks=ranks,
            witness=False, name="clusters", torchrun=False, key_file=tmp_path / "key",
            sites=[*((name, address) for name, address, _ in sites), ("", "")],
        )  # fmt: skip
        stack.callback(job.close)
        for rack, (_, _, border) in enumerate(sites):
            env = {
                "MEND_SOCKS_PROXY": f"tcp://{border}:{PROXY_PORT}",
                "MEND_DATA_PORTS": f"{DATA_PORT}-{DATA_PORT}",
            }
            job.start(rack, config=CONFIG, steps=16, env=env)
        for rack in range(2):
            job.ended(rack, code=0)
        results = [job.result(rack, rank) for rack in range(2) for rank in range(ranks)]
        assert len({result.digest for result in results}) == 1
        for result in results:
            assert result.status["ledger"]["open"] == 0
            assert {len(commit["members"]) for commit in result.commits} == {2}
        for rack, log in enumerate(logs):
            other = sites[1 - rack][1]
            reached = set(log.read_text().splitlines())
            assert reached == {f"{other}:21900", f"{other}:{DATA_PORT}"}, "one port for all ranks"


@needs_namespaces
def test_racks_of_two_clusters_without_the_proxy_do_not_meet(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Or the test above would show nothing."""
    create(tmp_path / "key", (bytes(range(32)),))
    with clusters() as sites:
        job = Job(
            nursery, tmp_path, [21900, 21900, 21899], racks=2, ranks=1, witness=False,
            name="clusters", torchrun=False, key_file=tmp_path / "key",
            sites=[*((name, address) for name, address, _ in sites), ("", "")],
        )  # fmt: skip
        with contextlib.closing(job):
            for rack in range(2):
                job.start(rack, config={**CONFIG, "start_timeout_s": 2}, steps=4)
            for rack in range(2):
                assert job.ended(rack) == 1
                assert job.result(rack).error[0] == "StartTimeout"
