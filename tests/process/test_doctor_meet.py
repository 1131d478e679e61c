"""`mend doctor --meet`: the doctors of several racks find each other, or say why not."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.process.racks import Forked, Nursery, environment, until

Report = dict[str, Any]


class Doctors:
    """Racks of one job on the loopback interface, each with a doctor when it is asked for."""

    def __init__(self, nursery: Nursery, folder: Path, ports: list[int]) -> None:
        self.nursery, self.folder, self.ports = nursery, folder, ports
        self.running: dict[int, Forked] = {}

    def start(self, rack: int, *arguments: str, peers: list[int] | None = None, **env: str) -> None:
        listed = ",".join(f"tcp://127.0.0.1:{port}" for port in peers or self.ports)
        own = {
            "MEND_RACK": str(rack), "MEND_RACKS": str(len(self.ports)),
            "MEND_SIDEBAND_PEERS": listed, "MEND_JOB_ID": "clinic", "COLUMNS": "100",
            "MEND_SIDEBAND_ADDR": f"tcp://127.0.0.1:{self.ports[rack]}", **env,
        }  # fmt: skip
        argv = ["mend.tools", "doctor", "--meet", *arguments]
        log = self.folder / f"rack{rack}.log"
        self.running[rack] = Forked(self.nursery, argv, environment(**own), log)

    def listens(self, rack: int) -> None:
        def heard() -> bool:
            assert self.running[rack].code is None, self.running[rack].log.read_text()
            log = self.running[rack].log
            return log.exists() and "hears" in log.read_text()

        until(heard, f"rack {rack} listens")

    def ended(self, rack: int) -> tuple[int, str]:
        code = self.running[rack].wait()
        return code, self.running[rack].log.read_text()

    def report(self, rack: int, code: int) -> Report:
        status, text = self.ended(rack)
        assert status == code, text
        found: Report = json.loads(text)
        return found


Make = Callable[[int], Doctors]


@pytest.fixture
def doctors(nursery: Nursery, tmp_path: Path, free_ports: Callable[[int], list[int]]) -> Make:
    def make(racks: int) -> Doctors:
        return Doctors(nursery, tmp_path, free_ports(racks))

    return make


def said(report: Report, severity: str, topic: str) -> str:
    """Everything of that kind, as one text."""
    return "\n".join(
        f"{each['found']} {each['change']}"
        for each in report["findings"]
        if (each["severity"], each["topic"]) == (severity, topic)
    )


def test_three_racks_meet_and_the_one_with_another_setting_is_named(doctors: Make) -> None:
    met = doctors(3)
    options = ("--json", "--for", "60", "--bandwidth", "0.1", "--params", "40M", "--step-ms", "900")
    for rack, period in enumerate(("64", "64", "32")):
        met.start(rack, *options, MEND_SYNC_PERIOD_STEPS=period)
    first, second, third = (met.report(rack, 1) for rack in range(3))
    for report in (first, second, third):
        assert "all 3 racks met" in said(report, "ok", "meeting")
        assert report["meeting"]["turns_done"]
        for seen in report["meeting"]["peers"]:
            assert seen["heard"]
            assert seen["hears_us"]
            assert seen["trips"] >= 50
            assert 0 < seen["p50_ms"] <= seen["p99_ms"]
            flows = [seen[way] for way in ("here", "there", "together")]
            assert all(flow["mbit"] > 0 and not flow["error"] for flow in flows), flows
        assert report["exchange"]["total_ms"] > 0
        assert report["memory"]["params"] == 40_000_000
    there = first["meeting"]["peers"][0]["there"]["mbit"]
    here = second["meeting"]["peers"][0]["here"]["mbit"]
    assert there == pytest.approx(here), "both ends tell the same of one direction"
    assert said(first, "problem", "rack 1") == ""
    for report, topic in ((first, "rack 2"), (second, "rack 2"), (third, "rack 0")):
        told = said(report, "problem", topic)
        assert "sync_period_steps is " in told
        assert "Set MEND_SYNC_PERIOD_STEPS alike" in told
    assert "tau=8" in said(first, "ok", "overlap") + said(first, "note", "overlap")


def test_who_does_not_come_is_told_with_the_reason(doctors: Make) -> None:
    """Of four racks one has another job's name, one thinks that rack 0 is elsewhere, one is not
    there at all."""
    met = doctors(4)
    nowhere = [met.ports[3], *met.ports[1:]]  # nobody listens there
    met.start(1, "--for", "600", "--bandwidth", "0", MEND_JOB_ID="other")
    met.start(2, "--for", "600", "--bandwidth", "0", peers=nowhere)
    met.listens(1)
    met.listens(2)
    met.start(0, "--json", "--for", "3", "--bandwidth", "0")
    report = met.report(0, 1)
    met.running[1].signal(signal.SIGINT)
    other_job = said(report, "problem", "rack 1")
    assert "Rack 1 came with job id 'other'; this rack has 'clinic'" in other_job
    assert "Set the same MEND_JOB_ID" in other_job
    one_way = said(report, "problem", "rack 2")
    assert "listens at" in one_way, one_way
    assert "check entry 0 of MEND_SIDEBAND_PEERS there" in one_way
    absent = said(report, "problem", "rack 3")
    assert "Rack 3 did not come" in absent
    assert "refused the connection" in absent
    assert "Start `mend doctor --meet`" in absent
    code, text = met.ended(2)  # rack 0 went, so nobody is left to wait for
    assert code == 1
    assert "One direction fails: rack 0 is heard here" in text
    assert "refused the connection" in text
    code, text = met.ended(1)
    assert code == 130, "Ctrl-C"
    assert "stopped; nothing was changed" in text
    assert "Traceback" not in text


def test_a_port_that_another_program_holds_is_told_with_its_name(doctors: Make) -> None:
    met = doctors(2)
    with closing(socket.create_server(("127.0.0.1", met.ports[0]))):
        met.start(0, "--for", "5")
        code, text = met.ended(0)
    assert code == 1
    assert "Another program has the port of this rack: process" in text, text
    assert "Traceback" not in text
