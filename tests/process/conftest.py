"""Fixtures of the process tests: jobs that are ended with their test."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import mend
from mend.tools.keys_command import create
from tests.gate import shards
from tests.process.racks import Job, Nursery, Whole, until

Jobs = Callable[..., Job]


def ends_of(request: pytest.FixtureRequest) -> Whole:
    """WHOLE_ENDS in a module: its tests ask how processes end. Of any other module the first test
    that has a job asks it of one process: the end of an interpreter costs a fork 0.3 s of CPU, and
    all else that a rack of a few steps does costs it less."""
    if getattr(request.module, "WHOLE_ENDS", False):
        return Whole.ALL
    with_jobs = (
        item
        for item in request.session.items
        if item.path == request.path
        and "jobs" in item.fixturenames
        and not item.get_closest_marker("skip")
    )
    return Whole.ONE if next(with_jobs) is request.node else Whole.NONE


def is_judged(request: pytest.FixtureRequest) -> bool:
    """Whether the tapes of this test are judged: where its shard runs (tests/gate/shards.py), as it
    costs a fifth of the CPU time of a test."""
    shard = shards.parse(request.config.option.shard).shard
    return shard is None or shards.shard_of(request.node.nodeid) == shard


@pytest.fixture
def jobs(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path: Path,
    free_ports: Callable[[int], list[int]],
) -> Iterator[Jobs]:  # fmt: skip
    made: list[Job] = []
    whole = ends_of(request)

    def make(
        racks: int = 2, *, ranks: int = 1, witness: bool = False, name: str = "",
        torchrun: bool = False, key: bool = False, sizes: Sequence[int] = (),
    ) -> Job:  # fmt: skip
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        ports = free_ports(2 * racks + 1)
        if key:
            create(folder / "key", (bytes(range(32)),))
        job = Job(
            nursery, folder, ports, racks=racks, ranks=ranks, witness=witness,
            name=name or f"test-{len(made)}", torchrun=torchrun, whole=whole,
            key_file=folder / "key" if key else None, sizes=sizes,
        )  # fmt: skip
        made.append(job)
        return job

    yield make
    for job in made:
        job.close()
    for job in made if is_judged(request) else ():
        job.judge()


@pytest.fixture
def job(jobs: Jobs) -> Job:
    """Two racks of one rank; rack 0's leader coordinates."""
    return jobs()


def be_rack_0(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, from its next MendConfig on."""
    for name, value in job.environment(0).items():
        if name.startswith("MEND_"):
            monkeypatch.setenv(name, value)


Configure = Callable[..., mend.MendConfig]


@pytest.fixture
def alone(free_ports: Callable[[int], list[int]]) -> Iterator[Configure]:
    """Configurations of a job of one rack, in this process, that always wants the same two ports.

    Whatever the test did, no thread of mend is left behind it.
    """
    sideband, lane = (f"{port}" for port in free_ports(2))

    def make(**more: Any) -> mend.MendConfig:
        address = f"tcp://127.0.0.1:{sideband}"
        own = {"rack": 0, "racks": 1, "sideband_addr": address, "sideband_peers": (address,)}
        rounds = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "codec": "float32"}
        return mend.MendConfig(**{**rounds, **own, "data_ports": f"{lane}-{lane}", **more})

    yield make
    until(lambda: mend_threads() == [], lambda: f"all threads end: {mend_threads()}")


@pytest.fixture
def warm(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher in this process has its racks forked."""
    monkeypatch.setattr(sys, "executable", nursery.python)


_older = weakref.WeakSet[threading.Thread]()
"""Threads of tests before: one of numerics alone leaves those of its pool to the collector."""


@pytest.fixture(autouse=True)
def remember_older_threads() -> None:
    _older.clear()
    _older.update(threading.enumerate())


def mend_threads() -> list[str]:
    """Names of mend's threads that this test has started and that still run. Nobody waits for a
    look-up of addresses, which a rank that ends early may overtake."""
    threads = [each for each in threading.enumerate() if each not in _older]
    for thread in threads:
        if thread.name == "mend-lookup":
            thread.join(5)
    threads = [each for each in threads if each.is_alive()]
    return sorted(thread.name for thread in threads if "mend" in thread.name)
