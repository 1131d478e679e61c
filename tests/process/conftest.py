"""Fixtures of the process tests: one nursery for all, and jobs that are ended with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.racks import Job, Nursery

Jobs = Callable[..., Job]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def jobs(
    nursery: Nursery, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> Iterator[Jobs]:
    made: list[Job] = []

    def make(racks: int = 2, *, ranks: int = 1, witness: bool = False, name: str = "") -> Job:
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        ports = free_ports(racks + 1)
        job = Job(
            nursery, folder, ports, racks=racks, ranks=ranks, witness=witness,
            name=name or f"test-{len(made)}",
        )  # fmt: skip
        made.append(job)
        return job

    yield make
    for job in made:
        job.close()


@pytest.fixture
def job(jobs: Jobs) -> Job:
    """Two racks of one rank; rack 0's leader coordinates."""
    return jobs()
