"""`mend doctor --meet`: the racks begin a job of the doctor's own together, or hear why not."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mend.tools.keys_command import create
from tests.process.racks import Forked, Nursery, Siblings, environment, until

Report = dict[str, Any]


def read(text: str) -> Report:
    """The report among lines of the log."""
    found: Report = json.JSONDecoder().raw_decode(text, text.index("{\n"))[0]
    return found


class Doctors:
    """Racks of one job on the loopback interface, each with a doctor when it is asked for."""

    def __init__(self, nursery: Nursery, folder: Path, ports: list[int]) -> None:
        self.nursery, self.folder, self.ports = nursery, folder, ports
        self.running: dict[int, Forked] = {}

    def env(self, rack: int, peers: list[int] | None = None, **more: str) -> dict[str, str]:
        listed = ",".join(f"tcp://127.0.0.1:{port}" for port in peers or self.ports)
        own = {
            "MEND_RACK": str(rack), "MEND_RACKS": str(len(self.ports)),
            "MEND_SIDEBAND_PEERS": listed, "MEND_JOB_ID": "clinic", "COLUMNS": "100",
            "MEND_SIDEBAND_ADDR": f"tcp://127.0.0.1:{self.ports[rack]}", **more,
        }  # fmt: skip
        return environment(**own)

    def start(self, rack: int, *arguments: str, peers: list[int] | None = None, **env: str) -> None:
        argv = ["mend.tools", "doctor", "--meet", *arguments]
        log = self.folder / f"rack{rack}.log"
        self.running[rack] = Forked(self.nursery, argv, self.env(rack, peers, **env), log)

    def listens(self, rack: int) -> None:
        def is_open() -> bool:
            assert self.running[rack].code is None, self.running[rack].log.read_text()
            with closing(socket.socket()) as asking:
                return asking.connect_ex(("127.0.0.1", self.ports[rack])) == 0

        until(is_open, f"rack {rack} listens")

    def ended(self, rack: int) -> tuple[int, str]:
        code = self.running[rack].wait()
        return code, self.running[rack].log.read_text()

    def report(self, rack: int, code: int) -> Report:
        status, text = self.ended(rack)
        assert status == code, text
        return read(text)


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


def test_racks_begin_measure_each_other_and_leave_nothing(doctors: Make, tmp_path: Path) -> None:
    met = doctors(2)
    create(key := tmp_path / "key", (bytes(range(32)),))
    (kept := tmp_path / "kept").mkdir()
    (temporary := tmp_path / "tmp").mkdir()
    options = ("--json", "--megabytes", "1", "--for", "60", "--params", "4M", "--step-ms", "900")
    env = {"MEND_KEY_FILE": str(key), "MEND_DIAGNOSTICS_DIR": str(kept), "TMPDIR": str(temporary)}
    for rack, heartbeat in enumerate(("100", "150")):
        met.start(rack, *options, MEND_SIDEBAND_HEARTBEAT_MS=heartbeat, **env)
    for rack in range(2):
        report = met.report(rack, 0)
        assert "all 2 racks began together" in said(report, "ok", "meeting")
        (seen,) = report["meeting"]["peers"]
        assert seen["mbit"] > 0
        assert seen["megabytes"] == pytest.approx(1.0)
        assert seen["trips"] == 50
        assert 0 < seen["p50_ms"] <= seen["p99_ms"]
        assert abs(seen["clock_ms"]) < 1000
        assert not seen["locked"]
        note = said(report, "note", f"rack {1 - rack}")
        assert "sideband_heartbeat_ms is " in note
        assert report["plan"]["settings"]["exchange_ms"] > 0
        assert "racks that begin with equal weights (one seed, or" in said(report, "ok", "start")
        assert report["meeting"]["inbound_mbit"] == pytest.approx(seen["mbit"], rel=0.1)
    assert not list(kept.iterdir())
    assert not list(temporary.iterdir())


def test_a_rack_that_does_not_come_is_named_with_the_cause(doctors: Make) -> None:
    """Of four racks one has another job's name, one thinks that rack 0 is elsewhere, one is not
    there at all."""
    met = doctors(4)
    nowhere = [met.ports[3], *met.ports[1:]]  # nobody listens there
    met.start(1, "--for", "600", MEND_JOB_ID="other")
    met.start(2, "--json", "--for", "600", peers=nowhere)
    met.listens(1)
    met.listens(2)
    met.start(0, "--json", "--for", "10")
    report = met.report(0, 1)
    assert "rack 1 is of job 'other-doctor'" in said(report, "problem", "meeting")
    other_job = said(report, "problem", "rack 1")
    assert "Rack 1 came with job id 'other'; this rack has 'clinic'" in other_job
    one_way = said(report, "problem", "rack 2")
    assert "One direction fails: rack 2 is there and is reached from here" in one_way
    assert "its entry 0 of MEND_SIDEBAND_PEERS" in one_way
    absent = said(report, "problem", "rack 3")
    assert "Rack 3 did not come" in absent
    assert "refused the connection" in absent
    met.running[1].signal(signal.SIGINT)
    met.running[2].signal(signal.SIGINT)
    for rack in (1, 2):
        code, text = met.ended(rack)
        assert code == 130, text
        assert "stopped; nothing was changed" in text
        assert "Traceback" not in text


def test_all_ranks_of_a_rack_take_part_and_the_first_one_tells(
    doctors: Make, free_ports: Callable[[int], list[int]]
) -> None:
    met, stores = doctors(2), free_ports(2)
    argv = ["mend.tools", "doctor", "--meet", "--json", "--megabytes", "1", "--for", "60"]
    env = {"MEND_LOCKSTEP": "true", "MEND_MOMENTUM_SYNC_PERIOD_STEPS": "256"}
    racks = [
        Siblings(met.nursery, argv, 2, met.env(r, **env), met.folder / f"rack{r}", stores[r])
        for r in range(2)
    ]
    for rack in racks:
        first, second = rack.ranks
        assert rack.wait() == 0, first.log.read_text() + second.log.read_text()
        assert '"findings"' not in second.log.read_text()
        text = first.log.read_text()
        report = read(text)
        assert "all 2 racks began together" in said(report, "ok", "meeting")
        (seen,) = report["meeting"]["peers"]
        assert seen["megabytes"] == pytest.approx(1.0), "the halves of both ranks"


def test_a_port_that_another_program_holds_is_told_with_its_name(doctors: Make) -> None:
    met = doctors(2)
    with closing(socket.create_server(("127.0.0.1", met.ports[0]))):
        met.start(0, "--for", "5")
        code, text = met.ended(0)
    assert code == 1
    assert "Held by process" in text, text
    assert "Traceback" not in text
