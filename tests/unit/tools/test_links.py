"""What `--link` means, what is missing for it, and when a link is not what was asked for."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from mend.config import MendConfig
from mend.errors import ConfigError, LinkError
from mend.tools import links as links_module
from mend.tools import links_check
from mend.tools.launch import Job, inner_interfaces, rack_environments, witness_command
from mend.tools.links import Link, Net, Site, links, remove_leftovers
from mend.tools.links_check import Measured, difference, measure, verify


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("400mbit,20ms", Link(400_000_000, 20.0)),
        ("400mbit,20ms,1%", Link(400_000_000, 20.0, 1.0)), ("1.5gbit", Link(1_500_000_000)),
        ("2000kbit, 0.5ms, 0.1%", Link(2_000_000, 0.5, 0.1)),
        ("100Mbit,10MS", Link(100_000_000, 10.0)), ("400mbit,1%", Link(400_000_000, 0.0, 1.0)),
        ("1mbit,10000ms,50%", Link(1_000_000, 10_000.0, 50.0)), ("100gbit", Link(100_000_000_000)),
    ],
)  # fmt: skip
def test_a_link_is_read_as_it_is_written(text: str, link: Link) -> None:
    assert Link.parse(text) == link
    assert Link.parse(str(link)) == link


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "is not RATE"), ("fast", "is not RATE"), ("400,20", "is not RATE"),
        ("400mbps", "is not RATE"), ("999.999kbit", "rate must be"), ("100.1gbit", "rate must be"),
        ("1gbit,10000.5ms", "round trip must be"), ("1gbit,20ms,50.1%", "loss must be"),
        ("10kbit", "rate must be"), ("400gbit", "rate must be"),
        ("9" * 400 + "gbit", "rate must be"),
        ("1gbit,20000ms", "round trip must be"), ("1gbit,20ms,80%", "loss must be"),
    ],
)  # fmt: skip
def test_invalid_link_is_refused_with_a_valid_example(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        Link.parse(text)
    assert "--link 400mbit,20ms" in str(caught.value)


def test_a_job_with_a_wrong_link_is_not_built() -> None:
    for text in ("fast", ""):  # the latter: a shell variable that is not set
        with pytest.raises(ConfigError, match=f"--link='{text}'"):
            Job(command=("train.py",), link=text)


def test_a_job_with_a_link_that_cannot_be_measured_is_not_built() -> None:
    """It was made, and failed after a minute of handshakes."""
    with pytest.raises(ConfigError, match="must be at most 1000ms"):
        Job(command=("train.py",), link="10mbit,9000ms")
    assert Job(command=("train.py",), link="10mbit,1000ms").link == "10mbit,1000ms"


def test_sites_are_the_racks_and_then_the_witness_if_there_is_one() -> None:
    racks, witness = (Site("a", "10.0.0.1"), Site("b", "10.0.0.2")), Site("w", "10.0.0.9")
    link = Link.parse("1gbit")
    assert Net(link, racks, None, "").hosts == ("10.0.0.1", "10.0.0.2")
    assert Net(link, racks, witness, "").hosts == ("10.0.0.1", "10.0.0.2", "10.0.0.9")


def test_packets_are_large_where_that_holds_nobody_up() -> None:
    assert Link.parse("50mbit").mtu == 1500
    assert Link.parse("100mbit").mtu == 9000


def test_racks_are_told_addresses_that_the_other_namespaces_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(command=("train.py",), job_id="story", link="1gbit,5ms")
    sites = [Site(f"n{rack}", f"10.213.0.{rack + 1}") for rack in range(2)]
    net = Net(Link.parse(job.link), tuple(sites), Site("w", "10.213.0.254"), "")
    shell = {"MEND_ADVERTISE_HOST": "10.0.0.1"}
    environments = rack_environments(job, shell, [5001, 5002, 5003], [], net.hosts)
    for key, value in environments[1].items():
        monkeypatch.setenv(key, value)
    config = MendConfig()
    assert config.bind_address == "tcp://10.213.0.2:5002"
    assert config.advertise_host == "10.213.0.2"
    assert config.peer_addresses[0] == "tcp://10.213.0.1:5001"
    assert config.witness_addr == "tcp://10.213.0.254:5003"
    assert "tcp://10.213.0.254:5003" in witness_command(job, 5003, net.hosts[-1])
    assert net.sites[1].prefix == ("ip", "netns", "exec", "n1")


def test_the_ranks_of_a_rack_meet_on_loopback_unless_told_otherwise() -> None:
    assert inner_interfaces({"NCCL_SOCKET_IFNAME": "ib0"}) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "ib0",
    }


def nothing_made(*_: object, **__: object) -> None:
    pytest.fail("something was made")


@pytest.fixture
def root_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(links_module.sys, "platform", "linux")
    monkeypatch.setattr(links_module, "TUN", Path("/"))
    monkeypatch.setattr(links_module.shutil, "which", lambda program: program)
    monkeypatch.setattr(links_module.subprocess, "run", nothing_made)


@pytest.mark.usefixtures("root_with_all")
@pytest.mark.parametrize("missing", ["root", "linux", "tun", "iperf3", "ip"])
def test_missing_requirement_is_reported_before_anything_is_made(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = {
        "root": "sudo", "linux": "sudo", "tun": "modprobe tun", "iperf3": "apt install iperf3",
        "ip": "apt install iproute2",
    }[missing]  # fmt: skip
    if missing == "root":
        monkeypatch.setattr(links_module.os, "geteuid", lambda: 1000)
    elif missing == "linux":
        monkeypatch.setattr(links_module.sys, "platform", "darwin")
    elif missing == "tun":
        monkeypatch.setattr(links_module, "TUN", Path("/nowhere/tun"))
    else:
        monkeypatch.setattr(
            links_module.shutil, "which", lambda program: None if program == missing else program
        )
    with pytest.raises(LinkError, match=remedy), links(Link.parse("1gbit"), racks=2):
        pass


def test_only_namespaces_of_dead_launches_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, alive = 2**22 + 1, 1  # above the largest id that Linux gives; init
    mine = [f"mend-{gone}-0-rack0", f"mend-{gone}-3-hub"]
    for name in (*mine, f"mend-{alive}-0-rack0", "mend", f"mending-{gone}-0-x", "blue"):
        (tmp_path / name).touch()
    deleted: list[str] = []
    monkeypatch.setattr(links_module, "NETNS", tmp_path)
    monkeypatch.setattr(links_module, "_delete", deleted.append)
    assert remove_leftovers() == sorted(mine) == deleted
    monkeypatch.setattr(links_module, "NETNS", tmp_path / "none")
    assert remove_leftovers() == []


LINK = Link.parse("100mbit,20ms,1%")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (Measured(20.6, (95e6, 98e6), (1.2, 0.8)), ""),
        (Measured(40.0, (95e6, 98e6), (1.0, 1.0)), "the round trip is 40.0 ms"),
        (Measured(10.0, (95e6, 98e6), (1.0, 1.0)), "the round trip is 10.0 ms"),
        (Measured(20.0, (95e6, 60e6), (1.0, 1.0)), "the rate is 60 Mbit/s"),
        (Measured(20.0, (130e6, 98e6), (1.0, 1.0)), "the rate is 130 Mbit/s"),
        (Measured(20.0, (95e6, 98e6), (1.0, 9.0)), "the loss is 9.00 %"),
    ],
)
def test_a_link_that_is_not_as_asked_is_told_with_what_it_is(
    found: Measured, sentence: str
) -> None:
    assert difference(LINK, found) == sentence


def test_a_round_trip_of_nothing_may_take_a_little() -> None:
    assert difference(Link.parse("1gbit"), Measured(0.3, (1e9, 1e9), None)) == ""


def test_figures_are_told_in_one_line() -> None:
    assert str(Measured(20.41, (395.9e6, 390.2e6), None)) == (
        "measured rtt=20.4ms rate=395.9/390.2mbit"
    )
    assert str(Measured(1, (1e6, 2e6), (1.0, 0.5))).endswith("loss=1.00/0.50%")


def two_sites(text: str) -> Net:
    return Net(Link.parse(text), (Site("a", "10.213.0.1"), Site("b", "10.213.0.2")), None, "")


@pytest.fixture
def asked_of_iperf3(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Its command lines. It finds 97 and 95 Mbit/s and 1.1 and 0.9 % lost; handshakes take 21 ms
    and longer."""
    commands: list[list[str]] = []
    received = {"bits_per_second": 97e6, "lost_percent": 1.1}
    reverse = {"bits_per_second": 95e6, "lost_percent": 0.9}
    sums = {"sum_received": received, "sum_received_bidir_reverse": reverse}

    def output(command: list[str]) -> str:
        assert command[:4] == ["ip", "netns", "exec", "a"]
        if "iperf3" not in command:
            return "1021.0\n22.5\n21.0\n"
        commands.append(command)
        return json.dumps({"end": sums})

    monkeypatch.setattr(links_check, "_output", output)
    monkeypatch.setattr(links_check, "_server", nullcontext)
    return commands


def test_a_link_without_losses_is_measured_by_tcp(asked_of_iperf3: list[list[str]]) -> None:
    found = measure(two_sites("100mbit,20ms"))
    assert found == Measured(21.0, (97e6, 95e6), None)
    (command,) = asked_of_iperf3
    assert {"--bidir", "10.213.0.2"} <= set(command)
    assert "-u" not in command


def test_a_link_with_losses_is_measured_by_udp(asked_of_iperf3: list[list[str]]) -> None:
    """What arrives is the rate less what is lost on purpose."""
    found = measure(two_sites("100mbit,20ms,1%"))
    assert found.rate_bits == pytest.approx((97e6 / 0.99, 95e6 / 0.99))
    assert found.loss_pct == (1.1, 0.9)
    offered = [command[command.index("-b") + 1] for command in asked_of_iperf3]
    assert offered == ["50000000", "125000000"]
    assert all("-u" in command for command in asked_of_iperf3)


def test_a_link_is_asked_thrice_and_refused_with_what_it_is(
    asked_of_iperf3: list[list[str]],
) -> None:
    assert verify(two_sites("100mbit,20ms")).rtt_ms == 21.0
    assert len(asked_of_iperf3) == 1
    with pytest.raises(LinkError, match=r"the rate is 97 Mbit/s \(measured rtt=21.0ms"):
        verify(two_sites("200mbit,20ms"))
    assert len(asked_of_iperf3) == 1 + 3
