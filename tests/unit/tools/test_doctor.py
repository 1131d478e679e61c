"""`mend doctor` on machines without a GPU, and with GPUs that a file or a fake tells of."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mend.errors import ConfigError
from mend.hardware.cpu_affinity import HostTopology
from mend.tools import app
from mend.tools.doctor import examine as module
from mend.tools.doctor.examine import examine
from mend.transport.bulk_client import BulkLane
from tests.unit.config.test_topology import ALL
from tests.unit.hardware.dumps import dgx, sockets


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL:
        monkeypatch.delenv(name, raising=False)


def told(*arguments: str, code: int = 0) -> str:
    answer = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})
    assert answer.exit_code == code, answer.output
    return answer.output


def test_a_machine_without_gpu_and_an_empty_environment() -> None:
    report = json.loads(told("--json"))
    assert report["devices"] == []
    assert report["nccl_dump"] is None
    assert report["problems"] == report["settings"] == []
    assert report["topology"]["source"].startswith("nothing: ")
    assert {"mend", "torch", "python"} <= report["versions"].keys()
    assert [port["port"] for port in report["ports"]] == [21899, 21900, 21901]
    text = told()
    assert "no GPU: torch sees none here" in text
    assert "no problem found" in text


def test_a_dump_is_shown_gpu_by_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "topo.xml"
    path.write_text(dgx())
    rows = json.loads(told("--json", "--topology", str(path)))["nccl_dump"]
    assert len(rows) == 8
    assert rows[5] == {
        "bus_id": "0000:ab:00.0", "dev": 5, "rank": 5, "numa": 1, "switch": "0000:a9:00.0",
        "near_cores": "48-95,144-191", "near_nics": ["mlx5_5"], "joined_to": "0000:18:00.0",
    }  # fmt: skip
    text = told("--topology", str(path))
    assert "mlx5_5" in text
    assert "0000:ab:00.0" in text, "rich made an emoji of :ab:"
    path.write_text(sockets())
    monkeypatch.setenv("NCCL_TOPO_DUMP_FILE", str(path))
    assert examine(None)[0]["topology"]["source"].startswith("the NCCL topology dump")


def test_a_file_that_is_no_dump_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--topology="):
        examine(tmp_path / "none.xml")


def test_a_dump_that_nccl_has_yet_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TOPO_DUMP_FILE", str(tmp_path / "later.xml"))
    _, found = examine(None)
    assert not [each for each in found if each.severity == "problem"]


@pytest.fixture
def rack_at(
    monkeypatch: pytest.MonkeyPatch, free_ports: Callable[[int], list[int]]
) -> Callable[[str], tuple[int, int]]:
    """Makes this rack 1 at a host; returns the ports of its sideband and of its data."""

    def place(host: str) -> tuple[int, int]:
        here, data = free_ports(2)
        monkeypatch.setenv("MEND_RACK", "1")
        monkeypatch.setenv("MEND_SIDEBAND_ADDR", f"tcp://{host}:{here}")
        monkeypatch.setenv("MEND_DATA_PORTS", f"{data}-{data}")
        return here, data

    return place


def test_settings_and_who_said_them(
    monkeypatch: pytest.MonkeyPatch, rack_at: Callable[[str], tuple[int, int]]
) -> None:
    here, data = rack_at("127.0.0.1")
    monkeypatch.setenv("MEND_OVERLAP_STEPS", "20")
    monkeypatch.setenv("WORLD_SIZE", "8")
    report, _ = examine(None)
    assert {"field": "rack", "value": 1, "source": "MEND_RACK"} in report["settings"]
    assert report["topology"] | {"source": ""} == {
        "rack": 1, "racks": 2, "ranks_per_rack": 8, "world_size": 8, "source": "",
    }  # fmt: skip
    ports = {port["port"]: port for port in report["ports"]}
    assert ports[here]["what"] == "this rack's leader"
    assert ports[data]["what"] == "data"
    assert report["addresses"]["listens"] == f"tcp://127.0.0.1:{here}"
    assert any("more than a quarter" in note for note in report["notes"])


def test_data_ports_are_those_of_the_address_that_the_lane_binds(
    rack_at: Callable[[str], tuple[int, int]],
) -> None:
    """They were looked at on 127.0.0.1, whatever the address of the rack."""
    _, data = rack_at("[::1]")
    report, _ = examine(None)
    assert {port["port"]: port["host"] for port in report["ports"]}[data] == "::1"


def test_a_port_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("MEND_RACK", "0")
    monkeypatch.setenv("MEND_SIDEBAND_ADDR", f"tcp://127.0.0.1:{port}")
    with closing(BulkLane("127.0.0.1", (port, port), token=bytes(16))):
        output = told(code=1)
    assert "TAKEN" in output
    assert f"this rack's leader cannot listen at 127.0.0.1:{port}" in output


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"MEND_RACK": "9"}, "rack=9"),
        ({"MEND_RANKS_PER_RACK": "x"}, "MEND_RANKS_PER_RACK='x'"),
        ({"MEND_RANKS_PER_RACK": "3", "WORLD_SIZE": "8"}, "does not divide 8"),
        ({"MEND_MERGE_MIN": "2"}, "MEND_MERGE_MIN='2'"),
    ],
)
def test_setting_that_would_stop_a_job_is_a_problem(
    values: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert problem in told(code=1)


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ({"MEND_RANKS_PER_RACK": "4", "WORLD_SIZE": "8"}, "MEND_RANKS_PER_RACK"),
        ({"SLURM_NODEID": "1", "SLURMD_NODENAME": "n7"}, "SLURM_NODEID: node 1 (n7)"),
        (
            {
                "SLURM_TOPOLOGY_ADDR": "r1.s3.n7",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
            },
            "SLURM_TOPOLOGY_ADDR: r1 > s3,",
        ),
    ],
)
def test_topology_source_is_the_setting_that_defines_racks(
    values: dict[str, str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    topology = examine(None)[0]["topology"]
    assert topology["source"].startswith(source)
    assert topology["racks"] == (2 if "WORLD_SIZE" in values else None)


def test_gpus_with_what_is_near(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    for name, text in {"numa_node": "0", "local_cpulist": "0-3,8"}.items():
        (folder / name).write_text(text)
    path = tmp_path / "topo.xml"
    path.write_text(sockets())

    class Told:
        name, pci_domain_id, pci_bus_id, pci_device_id = "H200", 0, 0x17, 0

    def properties(index: int) -> Any:
        return Told()

    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(module.torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(
        module, "HostTopology", lambda: HostTopology(tmp_path / "sys", tmp_path / "proc")
    )
    (row,) = examine(path)[0]["devices"]
    assert row == {
        "index": 0, "name": "H200", "bus_id": "0000:17:00.0", "numa": 0,
        "near_cores": "0-3,8", "near_nics": ["eth0"],
    }  # fmt: skip
    assert "H200" in told("--topology", str(path))


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--for", "3"), "Add --meet"),
        (("--megabytes", "0"), "Add --meet"),
        (("--step-ms", "3"), "Add --params"),
        (("--params", "many"), "must be a number of parameters"),
    ],
)
def test_options_that_would_do_nothing_are_refused(arguments: tuple[str, ...], rule: str) -> None:
    answer = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(answer.exception, ConfigError)
    assert rule in str(answer.exception)


def test_memory_for_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(told("--json", "--params", "10M"))
    assert report["memory"]["anchors"] == 2 * 2 * 4 * 10_000_000
    assert "whether tau covers" not in str(report["findings"]).lower()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shared = json.loads(told("--json", "--params", "10M", "--step-ms", "100"))
    assert shared["memory"]["anchors"] == 2 * 4 * 10_000_000
    assert shared["memory"]["ranks_here"] == 2
    assert "bandwidth was not measured" in str(shared["findings"])
    huge = told("--params", "99T", code=1)
    assert "of host memory" in huge


def test_a_meeting_needs_a_rack_and_readable_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Set MEND_RACK." in told("--meet", code=1)
    monkeypatch.setenv("MEND_RACK", "9")
    assert "the settings cannot be read" in told("--meet", "--params", "1M", code=1)


def test_a_rack_alone_meets_nobody_and_says_so(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("MEND_RACK", "0")
    monkeypatch.setenv("MEND_SIDEBAND_PEERS", f"0=tcp://127.0.0.1:{free_port},1=tcp://b:1")
    monkeypatch.setenv("MEND_EXCHANGE", "false")
    assert "there is nobody to meet" in told("--meet", code=1), "the name of b is unknown"
    monkeypatch.setenv("MEND_SIDEBAND_PEERS", f"tcp://127.0.0.1:{free_port}")
    monkeypatch.setenv("MEND_RACKS", "1")
    assert "there is nobody to meet" in told("--meet")


def test_a_dump_without_a_gpu_is_said_to_have_none(tmp_path: Path) -> None:
    path = tmp_path / "topo.xml"
    path.write_text('<system version="1"><cpu numaid="0" affinity="f"/></system>')
    assert "no GPU in it" in told("--topology", str(path))


def test_free_data_ports_are_counted_and_not_listed(
    monkeypatch: pytest.MonkeyPatch, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("MEND_DATA_PORTS", f"{port}-{port}")
    said = CliRunner().invoke(app, ["doctor"]).output
    assert "1 of 1 data ports are free" in said
    assert str(port) not in said.partition("\nports\n")[2].partition("\naddresses\n")[0]


def test_racks_that_listen_on_every_address_are_examined(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """The README's own variables of two machines ended it with a ConfigError of `advertise`."""
    monkeypatch.setenv("MEND_RACK", "0")
    monkeypatch.setenv("MEND_SIDEBAND_PEERS", f"0=tcp://127.0.0.1:{free_port},1=tcp://b:1")
    monkeypatch.setenv("MEND_SIDEBAND_ADDR", f"tcp://0.0.0.0:{free_port}")
    monkeypatch.setenv("MEND_ADVERTISE_HOST", "127.0.0.1")
    answer = CliRunner().invoke(app, ["doctor"])
    assert not isinstance(answer.exception, ConfigError), answer.exception
    assert f"0.0.0.0:{free_port}" in answer.output
