"""Nobody reads stderr: a paused reader, `docker logs`, a full pipe. Training does not wait for it.

The log was written by the threads that train and that keep the heartbeats, so one full pipe stopped
the whole job for as long as it lasted.
"""

from __future__ import annotations

import os
import re
import threading
from typing import Any

import pytest

from mend.status.log_lines import LINES_MAX
from tests.process.racks import LIMIT_S, Job, until

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}
OPTIONS: dict[str, Any] = {"steps": 40, "config": CONFIG}


@pytest.fixture
def fifo(job: Job) -> str:
    path = str(job.folder / "stderr.fifo")
    os.mkfifo(path)
    return path


def test_a_log_that_nobody_reads_stops_neither_its_rack_nor_the_other(job: Job, fifo: str) -> None:
    loud = {"at": {"3": [["unread", fifo]], "20": [["record", 2 * LINES_MAX]]}}
    well, unread = job.run({1: {**OPTIONS, **loud}}, **OPTIONS)
    assert well.digest == unread.digest
    assert well.weights == unread.weights
    assert [len(each.commits) for each in (well, unread)] == [len(well.commits)] * 2
    assert len(well.commits) >= 10
    assert unread.threads == []
    assert unread.status["log_lines_lost"] > LINES_MAX / 2
    assert unread.status["events_lost"] == 0, "the file has what the log has not"
    assert len(unread.kinds("recorded")) == 2 * LINES_MAX
    (lost,) = unread.kinds("log-lost")
    assert lost["lines"] >= unread.status["log_lines_lost"]


def test_the_reader_that_is_back_is_told_how_much_it_missed(job: Job, fifo: str) -> None:
    gate = job.gate()
    acts = {
        "3": [["unread", fifo]],
        "20": [["record", 2 * LINES_MAX], ["gate", gate]],
    }
    for rack in range(2):
        job.start(rack, **OPTIONS, **({"at": acts} if rack else {}))
    until(lambda: len(recorded(job)) == 2 * LINES_MAX, "rack 1 has said more than a pipe holds")
    text = bytearray()
    descriptor = os.open(fifo, os.O_RDONLY)
    thread = threading.Thread(target=read, args=(descriptor, text))
    thread.start()
    until(lambda: b"log-lost" in text, "the reader is told")
    open(gate, "w").close()
    job.finish()
    thread.join(LIMIT_S)
    os.close(descriptor)
    said = text.decode().lstrip(".")
    # One gap, or several: a writer that wakes late takes some lines while the others come in.
    gaps = re.findall(r'mend rack=1 rank=0 log-lost lines=(\d+) msg="', said)
    lost = sum(map(int, gaps))
    result = job.result(1)
    assert lost == result.status["log_lines_lost"] > LINES_MAX / 2
    read_back = len(re.findall(r"rank=0 recorded .*\n", said))
    unrecorded = 2 * LINES_MAX - read_back
    assert 0 < unrecorded <= lost, "what is not there was told as lost"
    assert "version=" in said.split("log-lost")[-1], "and then the log goes on"
    assert job.result(0).digest == result.digest


def recorded(job: Job) -> list[dict[str, Any]]:
    return job.events(1, kind="recorded")


def read(descriptor: int, into: bytearray) -> None:
    while chunk := os.read(descriptor, 1 << 16):
        into += chunk
