"""Two clusters that reach each other through a proxy at their border only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mend.tools.keys_command import create
from mend.transport.bulk_link import SEALED_MAGIC
from mend.transport.bulk_wire import HELLO, WIRE_VERSION, hello_bytes, lane_token
from mend.transport.probe import GREETING
from tests.process.racks import Forked, Job, Nursery, Siblings, environment, until

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "lockstep": True,
}  # fmt: skip
PROXY_PORT, DATA_PORT = 1080, 22000
PORT = 21900
"""Of a sideband, and of all lanes of its rack where they share it."""

needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs root on Linux with ip",
)


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


Site = tuple[str, str, str]
"""Namespace of a cluster, its address, the border's address there."""


@contextlib.contextmanager
def clusters() -> Iterator[list[Site]]:
    """Two networks without a route to each other: each reaches its border, and the border reaches
    both."""
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


def proxies(stack: contextlib.ExitStack, sites: list[Site], folder: Path) -> list[Path]:
    """Of all borders; returns their logs."""
    logs = [folder / f"proxy{rack}.txt" for rack in range(len(sites))]
    for (_, _, border), log in zip(sites, logs, strict=True):
        stack.enter_context(proxy(border, log))
    return logs


def job_over(
    stack: contextlib.ExitStack, nursery: Nursery, folder: Path, sites: list[Site], **options: Any
) -> Job:
    """A rack in each cluster, and a witness, if there is one, in the first."""
    create(folder / "key", (bytes(range(32)),))
    job = Job(
        nursery, folder, [PORT, PORT, 21899, 29500, 29501], name="clusters", torchrun=False,
        key_file=folder / "key", sites=[site[:2] for site in (*sites, sites[0])],
        **{"racks": 2, "ranks": 1, "witness": False, **options},
    )  # fmt: skip
    stack.callback(job.close)
    return job


@needs_namespaces
@pytest.mark.parametrize("ranks", [1, 2])
def test_racks_of_two_clusters_meet_through_a_socks_proxy(
    nursery: Nursery, tmp_path: Path, ranks: int
) -> None:
    """Every rank's data port had to be reachable from the other cluster; now the proxy's has."""
    with contextlib.ExitStack() as stack:
        sites = stack.enter_context(clusters())
        logs = proxies(stack, sites, tmp_path)
        job = job_over(stack, nursery, tmp_path, sites, ranks=ranks)
        for rack, (_, _, border) in enumerate(sites):
            env = {
                "MEND_SOCKS_PROXY": f"tcp://{border}:{PROXY_PORT}",
                "MEND_DATA_PORTS": f"{DATA_PORT}-{DATA_PORT}",
            }
            job.start(rack, config=CONFIG, steps=16, env=env)
        job.finish()
        results = [job.result(rack, rank) for rack in range(2) for rank in range(ranks)]
        assert len({result.digest for result in results}) == 1
        for result in results:
            assert result.status["ledger"]["open"] == 0
            assert {len(commit["members"]) for commit in result.commits} == {2}
        for rack, log in enumerate(logs):
            other = sites[1 - rack][1]
            reached = set(log.read_text().splitlines())
            assert reached == {f"{other}:21900", f"{other}:{DATA_PORT}"}, "one port for all ranks"


@contextlib.contextmanager
def second_host(cluster: Site) -> Iterator[tuple[str, str, dict[str, str]]]:
    """(its namespace, the first host's address inside the cluster, settings of ranks of both) of
    another host of a cluster: it reaches the border, and the border's proxy must not need it."""
    name, tag = cluster[0] + "b", os.getpid() % 10_000
    out, inner, net = f"mo{tag}b", f"10.99.{tag % 250}", f"10.100.{tag % 250}"
    ip("netns", "add", name)
    try:
        ip("link", "add", out, "type", "veth", "peer", "name", "out", "netns", name)
        ip("addr", "add", f"{net}.1/24", "dev", out)
        ip("link", "set", out, "up")
        ip("-n", name, "addr", "add", f"{net}.2/24", "dev", "out")
        ip("-n", name, "link", "set", "out", "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", cluster[0], "link", "add", "rack", "type", "veth", "peer", "rack", "netns", name)
        for host, number in ((cluster[0], 2), (name, 3)):
            ip("-n", host, "addr", "add", f"{inner}.{number}/24", "dev", "rack")
            ip("-n", host, "link", "set", "rack", "up")
        ip("-n", name, "route", "add", f"{cluster[1]}/32", "via", f"{inner}.2")
        ip("-n", name, "route", "add", f"{cluster[2]}/32", "via", f"{net}.1")
        yield name, f"{inner}.2", {"MASTER_ADDR": f"{inner}.2", "GLOO_SOCKET_IFNAME": "rack"}
    finally:
        ip("link", "del", out, check=False)
        ip("netns", "del", name, check=False)


class TwoClusters:
    """Rack 0 is one host, rack 1 two; each has two ranks and is reached through the other's proxy
    at the address of its leader, at one port."""

    def __init__(
        self, stack: contextlib.ExitStack, nursery: Nursery, folder: Path, **config: object
    ) -> None:
        self._config = {**CONFIG, **config}
        self.ports = f"{PORT}-{PORT}"
        self.sites = stack.enter_context(clusters())
        self._second, _, self._inside = stack.enter_context(second_host(self.sites[1]))
        self._logs = proxies(stack, self.sites, folder)
        self.job = job_over(stack, nursery, folder, self.sites, ranks=2)

    def start(self, rack: int, **options: Any) -> None:
        name, address, border = self.sites[rack]
        env = {
            "MEND_SOCKS_PROXY": f"tcp://{border}:{PROXY_PORT}",
            "MEND_DATA_PORTS": self.ports,
            "MEND_SIDEBAND_ADDR": f"tcp://0.0.0.0:{PORT}",
            "MEND_ADVERTISE_HOST": address,
            **(self._inside if rack == 1 else {}),
        }
        namespaces = [name, self._second] if rack == 1 else []
        self.job.start(rack, config=self._config, env=env, namespaces=namespaces, **options)

    def reached(self, rack: int) -> set[str]:
        """Destinations that the proxy of a rack has connected to."""
        return set(self._logs[rack].read_text().splitlines())

    def address(self, rack: int) -> str:
        return f"{self.sites[rack][1]}:{PORT}"


def answer_to(address: str, greeting: bytes, rest: bytes = b"") -> bytes:
    """What comes back until the connection is closed. `rest`: sent once the greeting is answered,
    as a reset by who refuses it discards an answer that was not read yet."""
    host, _, port = address.partition(":")
    said = b""
    with (
        socket.create_connection((host, int(port)), 60) as sock,
        contextlib.suppress(ConnectionError),
    ):
        sock.sendall(greeting)
        if rest:
            said += sock.recv(1)
            sock.sendall(rest)
        while piece := sock.recv(1 << 16):
            said += piece
    return said


@needs_namespaces
def test_rack_of_two_hosts_is_reached_through_one_port_of_its_leader(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Every host of a rack had to be reachable from the other cluster, at two ports of the first
    one. Meanwhile strangers connect to that port."""
    with contextlib.ExitStack() as stack:
        two = TwoClusters(stack, nursery, tmp_path)
        job = two.job
        for rack in range(2):
            told = [["touch", job.gate(f"there{rack}")], ["gate", job.gate()]]
            two.start(rack, steps=16, at={"4": told})
        for rack in range(2):
            until(Path(job.gate(f"there{rack}")).exists, lambda: f"rack trains\n{job.stacks()}")
        wrong = [b"GET / HTTP/1.1\r\nHost: mend\r\n\r\n", hello_bytes(b"token of another "[:16])]
        far, at = hello_bytes(lane_token("clusters", 1)), two.address(1)
        for greeting in (*wrong, far + bytes(4096)):
            assert answer_to(at, greeting) == b"", "the relay and the far rank refuse it"
        assert answer_to(at, GREETING, bytes(4096))[:1] == GREETING[:1], "the sideband ends it"
        idle = [socket.create_connection((two.sites[1][1], PORT), 60) for _ in range(80)]
        for sock in idle:  # more than a rank has places
            stack.callback(sock.close)
            sock.sendall(HELLO.pack(SEALED_MAGIC, WIRE_VERSION, lane_token("clusters", 1)))
        Path(job.gate()).touch()
        job.finish()
        results = [job.result(rack, rank) for rack in range(2) for rank in range(2)]
        assert len({result.digest for result in results}) == 1
        for result in results:
            assert result.status["ledger"]["open"] == 0
            assert {len(commit["members"]) for commit in result.commits} == {2}
            assert result.status["frames_refused"] == 0
            assert result.threads == []
        for rack in range(2):
            assert two.reached(rack) == {two.address(1 - rack)}
        relayed = [result.status["bytes_relayed"] for result in results]
        pulled = results[1].status["bytes_received"]
        assert relayed[2] > pulled / 2, "what rank 1 of rack 0 pulls comes through it"
        assert relayed[1] == relayed[3] == 0


@needs_namespaces
def test_ranks_of_two_hosts_that_advertise_one_port_of_a_range_are_refused(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Other racks would have reached the first of them only."""
    with contextlib.ExitStack() as stack:
        two = TwoClusters(stack, nursery, tmp_path)
        two.ports = "22000-22031"
        two.start(1)
        assert two.job.ended(1) == 1
        for rank in range(2):
            kind, told = two.job.result(1, rank).error
            assert kind == "ConfigError"
            assert f"several ranks of this rack are at {two.sites[1][1]}:22000" in told


@needs_namespaces
def test_rack_of_two_hosts_ends_with_its_leader(nursery: Nursery, tmp_path: Path) -> None:
    """The other rack merges on alone."""
    with contextlib.ExitStack() as stack:
        two = TwoClusters(stack, nursery, tmp_path, lockstep=False)
        job = two.job
        for rack in range(2):
            two.start(rack, steps=1_000_000, pace_ms=20, stop=job.gate() if rack == 0 else "")
        for rack in range(2):
            job.event(rack, "commit", fragment=1)
        rack = job.processes[1]
        assert isinstance(rack, Siblings)
        rack.ranks[0].kill()
        assert rack.ranks[1].wait() != 0
        job.event(0, "rack-silent", peer=1)
        known = len(job.events(0, kind="commit"))
        until(
            lambda: len(job.events(0, kind="commit")) > known + 2,
            lambda: f"rack 0 merges on\n{job.stacks()}",
        )
        Path(job.gate()).touch()
        job.ended(0, code=0)


@needs_namespaces
def test_witness_and_top_reach_the_other_cluster_through_the_proxy(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Both had to run where they reach all racks without one."""
    with contextlib.ExitStack() as stack:
        sites = stack.enter_context(clusters())
        proxies(stack, sites, tmp_path)
        borders = [f"tcp://{border}:{PROXY_PORT}" for _, _, border in sites]
        settings = {"MEND_SOCKS_PROXY": borders[0]}
        job = job_over(stack, nursery, tmp_path, sites, witness=True, settings=settings)
        for rack in range(2):
            told = [["touch", job.gate(f"there{rack}")], ["gate", job.gate()]]
            own = {"MEND_SOCKS_PROXY": borders[rack], "MEND_DATA_PORTS": f"{PORT}-{PORT}"}
            job.start(rack, config=CONFIG, steps=16, at={"12": told}, env=own)
        for rack in range(2):
            until(Path(job.gate(f"there{rack}")).exists, lambda: f"rack trains\n{job.stacks()}")
        asks = ["mend.tools", "top", "--once", "--json", "--wait", "60", job.addresses[1]]
        seen = Forked(
            nursery, asks, environment(**settings, **job.keyed()),
            tmp_path / "top.txt", namespace=sites[0][0],
        )  # fmt: skip
        assert seen.wait() == 0
        picture = json.loads((tmp_path / "top.txt").read_text())
        assert [line["source"] for line in picture["racks"]] == ["itself", "itself"]
        Path(job.gate()).touch()
        job.finish()
        job.witness_ended()
        assert job.result(0).digest == job.result(1).digest


@needs_namespaces
def test_doctors_of_two_clusters_look_at_each_other_through_the_proxy(
    nursery: Nursery, tmp_path: Path
) -> None:
    """They met, and looked at no ports, settings and clocks, nor for a job that runs already."""
    create(tmp_path / "key", (bytes(range(32)),))
    with contextlib.ExitStack() as stack:
        sites = stack.enter_context(clusters())
        peers = ",".join(f"tcp://{address}:{PORT}" for _, address, _ in sites)
        doctors = []
        proxies(stack, sites, tmp_path)
        for rack, (name, address, border) in enumerate(sites):
            env = environment(
                MEND_RACK=str(rack), MEND_RACKS="2", MEND_JOB_ID="clinic",
                MEND_SIDEBAND_PEERS=peers, MEND_SIDEBAND_ADDR=f"tcp://{address}:{PORT}",
                MEND_ADVERTISE_HOST=address,
                MEND_DATA_PORTS=f"{DATA_PORT}-{DATA_PORT}", MEND_KEY_FILE=str(tmp_path / "key"),
                MEND_SOCKS_PROXY=f"tcp://{border}:{PROXY_PORT}",
            )  # fmt: skip
            argv = ["mend.tools", "doctor", "--meet", "--json", "--megabytes", "1", "--for", "60"]
            log = tmp_path / f"doctor{rack}.txt"
            doctors.append(Forked(nursery, argv, env, log, namespace=name))
        for doctor in doctors:
            assert doctor.wait() == 0, doctor.log.read_text()
            text = doctor.log.read_text()
            report, _ = json.JSONDecoder().raw_decode(text, text.index("{\n"))
            (seen,) = report["meeting"]["peers"]
            assert seen["speaks"]
            assert seen["settings"]
            assert abs(seen["clock_ms"]) < 1000


@needs_namespaces
def test_racks_of_two_clusters_without_the_proxy_do_not_meet(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Or the test above would show nothing."""
    with contextlib.ExitStack() as stack:
        job = job_over(stack, nursery, tmp_path, stack.enter_context(clusters()))
        for rack in range(2):
            job.start(rack, config={**CONFIG, "start_timeout_s": 2}, steps=4)
        for rack in range(2):
            assert job.ended(rack) == 1
            assert job.result(rack).error[0] == "StartTimeout"
