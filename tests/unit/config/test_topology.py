"""What the environment says of racks and nodes. Slurm's strings are those that Slurm writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mend.config import MendConfig
from mend.config.topology import Hints, read_hints, slurm_levels, slurm_nodes
from mend.errors import ConfigError
from tests import golden

ALL = (
    "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURM_NODEID", "SLURMD_NODENAME",
    "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE",
    "NCCL_TOPO_DUMP_FILE", "NCCL_TOPO_FILE",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL:
        monkeypatch.delenv(name, raising=False)


def told(monkeypatch: pytest.MonkeyPatch, **values: str) -> Hints:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return read_hints()


def test_an_empty_environment_says_nothing() -> None:
    assert read_hints() == Hints(None, None, (), "", None, 0, 1, None, None)


def test_a_rank_of_torchrun_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(
        monkeypatch, MEND_RANKS_PER_RACK="16", MEND_RACKS="2", LOCAL_RANK="3", WORLD_SIZE="32",
        LOCAL_WORLD_SIZE="8", SLURM_NODEID="1", SLURM_JOB_NODELIST="gpu[07-10]",
        SLURM_TOPOLOGY_ADDR="root.rack1.sw3.gpu08",
        SLURM_TOPOLOGY_ADDR_PATTERN="switch.switch.switch.node", NCCL_TOPO_FILE="/tmp/topo.xml",
    )  # fmt: skip
    levels = ("root", "rack1", "sw3")
    assert found == Hints(16, 2, levels, "gpu08", 1, 3, 8, 32, Path("/tmp/topo.xml"))


def test_ranks_per_rack_is_no_setting_and_no_mistake_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEND_RANKS_PER_RACK", "4")
    assert MendConfig().racks == 2
    monkeypatch.setenv("MEND_RANK_PER_RACK", "4")
    with golden.raises(ConfigError):
        MendConfig()


def test_a_number_counts_nodes_of_the_step_before_those_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """srun on a part of the nodes numbers that part."""
    values = {"SLURM_JOB_NODELIST": "a[1-4]", "SLURM_STEP_NODELIST": "a[3-4]"}
    assert told(monkeypatch, SLURM_NODEID="0", **values).node == "a3"
    assert told(monkeypatch, SLURMD_NODENAME="b").node == "b"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MEND_RANKS_PER_RACK", "0"), ("MEND_RANKS_PER_RACK", "-4"),
        ("MEND_RANKS_PER_RACK", "four"), ("MEND_RACKS", "2.0"), ("SLURM_NODEID", "²"),
        ("LOCAL_RANK", "1" * 10),
    ],
)  # fmt: skip
def test_a_value_that_is_no_number_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with golden.raises(ConfigError):
        told(monkeypatch, **{name: value})


def test_a_node_outside_of_its_own_list_is_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    with golden.raises(ConfigError):
        told(monkeypatch, SLURM_NODEID="2", SLURM_JOB_NODELIST="a[1-2]")


@pytest.mark.parametrize(
    ("address", "pattern", "levels"),
    [
        ("rack1.sw3.node7", "switch.switch.node", ("rack1", "sw3")),
        ("b8.tux1", "block.node", ("b8",)), ("tux1", "node", ()), ("", "", ()), ("s0", "", ()),
        ("s0.s[4-5].tux1", "switch.switch.node", ("s0", "s[4-5]")),
        ("s0.node7.example.org", "switch.node", ("s0",)),
        ("cube:0:1:2.n7", "torus:x:y:z.node", ("cube:0:1:2",)),
        (".leaf.n7", "switch.switch.node", ("", "leaf")),
    ],
)  # fmt: skip
def test_the_switches_above_a_node(address: str, pattern: str, levels: tuple[str, ...]) -> None:
    assert slurm_levels(address, pattern) == levels


@pytest.mark.parametrize(
    ("address", "pattern"),
    [
        ("s0.n1", "switch.switch.node"),
        ("s0.n1", "switch.switch"),
        ("s" * 5000 + ".n", "switch.node"),
    ],
)
def test_an_address_that_does_not_fit_its_pattern(address: str, pattern: str) -> None:
    with golden.raises(ConfigError):
        slurm_levels(address, pattern)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("tux1", ("tux1",)),
        ("tux[1-3,12],login", ("tux1", "tux2", "tux3", "tux12", "login")),
        ("gpu[08-11]", ("gpu08", "gpu09", "gpu10", "gpu11")),
        ("r[0-1]n[1-2]", ("r0n1", "r0n2", "r1n1", "r1n2")),
        ("a[7].example.org", ("a7.example.org",)),
    ],
)
def test_sets_of_nodes(text: str, names: tuple[str, ...]) -> None:
    assert slurm_nodes(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "a[", "a]", "a[[1]]", "a[]", "a[1-]", "a[3-1]", "a[x-y]",
        "a[0-999999999]", "a[0-99]b[0-99]c[0-99]", ",".join(["a[0-65000]"] * 50),
    ],
    ids=range(10),
)  # fmt: skip
def test_no_set_is_worse_than_an_error(text: str) -> None:
    """The last three would be more names than fit into memory."""
    with golden.raises(ConfigError):
        slurm_nodes(text)
