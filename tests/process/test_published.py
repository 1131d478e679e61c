"""The published quick start by real processes: nothing but its settings says who is who."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mend.tools.keys_command import create
from tests.process.racks import LIMIT_S, ROOT, Forked, Nursery, Siblings, environment, until

SCRIPT = ["tests.process.published"]
NETNS = Path("/run/netns")
HOSTS = "127.0.0.1 localhost\n10.214.0.1 peer1\n10.214.0.2 peer2\n"


def both_agree(found: list[dict[str, Any]]) -> None:
    assert [each["rack"] for each in found] == [0, 1]
    assert [each["racks"] for each in found] == [2, 2]
    assert found[0]["weights"] == found[1]["weights"]
    for each in found:
        assert each["rounds_committed"] > 4
        assert each["merged_share"] == 1.0


@dataclass
class Started:
    process: Forked
    out: Path

    def said(self) -> dict[str, Any]:
        assert self.process.wait() == 0, self.process.log.read_text(encoding="utf-8")
        result: dict[str, Any] = json.loads(self.out.read_text(encoding="utf-8"))
        return result

    def error(self) -> str:
        assert self.process.wait() == 1
        return self.process.log.read_text(encoding="utf-8").strip().rpartition("\n")[2]


Start = Callable[..., Started]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    made: list[Started] = []

    def begin(addr: str, peers: list[str], **more: object) -> Started:
        env = {name: str(value) for name, value in more.items()}
        name = tmp_path / f"rack{len(made)}"
        out, argv = name.with_suffix(".json"), [*SCRIPT, str(name.with_suffix(".json"))]
        argv += [addr, ",".join(peers)]
        made.append(
            Started(Forked(nursery, argv, environment(**env), name.with_suffix(".log")), out)
        )
        return made[-1]

    yield begin
    for each in made:
        each.process.kill()


@pytest.fixture
def two(free_ports: Callable[[int], list[int]]) -> list[str]:
    """Two machines, as far as an address goes: all of 127/8 is here."""
    (port,) = free_ports(1)
    return [f"tcp://127.0.0.2:{port}", f"tcp://127.0.0.3:{port}"]


def test_two_racks_with_one_list_find_their_own_entry(start: Start, two: list[str]) -> None:
    both_agree([one.said() for one in [start(at, two) for at in two]])


def test_two_racks_that_list_the_other_only_need_a_number_each(
    start: Start, two: list[str]
) -> None:
    lost = start(two[0], two[1:])
    assert "ConfigError: rack=None: sideband_peers has the other racks only" in lost.error()
    assert "Set MEND_RACK" in lost.error()
    pair = [start(at, [two[1 - r]], MEND_RACK=str(r)) for r, at in enumerate(two)]
    both_agree([one.said() for one in pair])


@dataclass
class Pair:
    """Two racks that cannot begin. The start of both times out once each has been heard to say
    what it waits for, or has ended."""

    racks: list[Started]
    gate: Path

    def errors(self, *words: str) -> list[str]:
        """The last words of both. `words`: of what each waits for."""

        def known(rack: Started, word: str) -> bool:
            events = rack.out.with_suffix(".diag").glob("events-*.jsonl")
            waits = [line for path in events for line in path.read_text().splitlines()]
            return any(line.startswith('{"kind":"waiting"') and word in line for line in waits)

        for rack, word in zip(self.racks, words, strict=True):
            until(
                lambda rack=rack, word=word: rack.process.code is not None or known(rack, word),
                f"it hears {word}",
            )
        self.gate.touch()
        return [rack.error() for rack in self.racks]


def test_two_racks_whose_lists_are_in_another_order_are_told(
    start: Start, two: list[str], tmp_path: Path
) -> None:
    """Each finds itself first in its list, so both are rack 0: each founds, and may refuse the
    other before it has heard that it founds as well."""
    gate = tmp_path / "gate"
    racks = [start(two[0], two, START_GATE=gate), start(two[1], two[::-1], START_GATE=gate)]
    same = [f"the process at {other} says that it is rack 0 as well" for other in two[::-1]]
    for said, twin in zip(Pair(racks, gate).errors(*same), same, strict=True):
        assert "another live process says it is rack 0" in said or twin in said


def test_two_racks_that_are_both_rack_1_are_told(
    start: Start, two: list[str], tmp_path: Path
) -> None:
    """Nobody coordinates, so nobody refuses: each takes the other for the coordinator."""
    gate = tmp_path / "gate"
    racks = [start(two[0], two[::-1], START_GATE=gate), start(two[1], two, START_GATE=gate)]
    same = [f"the process at {other} says that it is rack 1 as well" for other in two[::-1]]
    for said, twin in zip(Pair(racks, gate).errors(*same), same, strict=True):
        assert "StartTimeout" in said
        assert twin in said
        assert "compare MEND_RACK and the order of sideband_peers" in said


def test_ranks_of_a_rack_get_addresses_from_their_first_one(
    nursery: Nursery, tmp_path: Path, two: list[str], free_ports: Callable[[int], list[int]]
) -> None:
    racks = []
    for rack, (at, port) in enumerate(zip(two, free_ports(2), strict=True)):
        out = tmp_path / f"rack{rack}.json"
        argv = [*SCRIPT, str(out), at, ",".join(two)]
        racks.append(Siblings(nursery, argv, 2, environment(), out.with_suffix(".log"), port))
    codes = [rack.wait() for rack in racks]
    logs = sorted(tmp_path.glob("*.log"))
    assert codes == [0, 0], "".join(log.read_text(encoding="utf-8") for log in logs)
    for files in (["rack0.json", "rack1.json"], ["rack0.1.json", "rack1.1.json"]):
        both_agree([json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in files])


# ------------------------------------------------------------------ as it is published


needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"),
    reason="needs root on Linux and ip",
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Two network namespaces joined by a cable, in which peer1 and peer2 are names: for each the
    command that runs a program inside."""
    base = f"mend-test-{os.getpid()}"
    names = [f"{base}-1", f"{base}-2"]
    hosts = tmp_path / "hosts"
    hosts.write_text(HOSTS, encoding="utf-8")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "wire", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.214.0.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"no pair of namespaces here: {error.stderr.decode().strip()}")
    bound = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    yield [
        ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", bound, "sh"]
        for name in names
    ]
    for name in names:
        ip("netns", "del", name)


def end(processes: list[subprocess.Popen[str]]) -> None:
    """Nothing of them is left for another test to find."""
    for process in processes:
        process.kill()
        process.communicate()


@needs_namespaces
@pytest.mark.parametrize(
    "way", ["MEND_KEY_FILE", pytest.param("MEND_INSECURE", marks=pytest.mark.slow)]
)
def test_the_quick_start_runs_as_it_is_published(
    machines: list[list[str]], tmp_path: Path, way: str
) -> None:
    """Nothing of the environment differs between the two; only the machines do."""
    create(tmp_path / "key", (bytes(32),))
    env = environment(**{way: {"MEND_KEY_FILE": str(tmp_path / "key")}.get(way, "1")})
    outs = [tmp_path / f"rack{number}.json" for number in range(2)]
    processes = [
        subprocess.Popen(
            [*inside, sys.executable, "-m", *SCRIPT, str(out)], cwd=ROOT, env=env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for inside, out in zip(machines, outs, strict=True)
    ]  # fmt: skip
    try:
        for process in processes:
            said, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, said
            assert said.count("insecure: tcp://0.0.0.0:51900") == (way == "MEND_INSECURE"), said
    finally:
        end(processes)
    both_agree([json.loads(out.read_text(encoding="utf-8")) for out in outs])


def test_the_quick_start_without_a_key_is_refused_with_both_remedies(
    nursery: Nursery, tmp_path: Path
) -> None:
    log = tmp_path / "rack.log"
    argv = [
        *SCRIPT, str(tmp_path / "rack.json"), "tcp://0.0.0.0:51900", "tcp://a:51900,tcp://b:51900",
    ]  # fmt: skip
    rack = Forked(nursery, argv, environment(MEND_RACK="0", MEND_RACKS="2"), log)
    assert rack.wait() == 1
    (said,) = [line for line in log.read_text().splitlines() if "errors.ConfigError: " in line]
    assert "is reached from outside, and there is no key" in said
    assert "`mend keys new FILE` and set MEND_KEY_FILE=FILE" in said
    assert "or set MEND_INSECURE=1 (insecure=True)" in said


def test_one_process_group_over_two_racks_is_refused(
    start: Start, two: list[str], free_ports: Callable[[int], list[int]]
) -> None:
    """One torchrun over both machines, without a mesh: all ranks would be rack 0."""
    (port,) = free_ports(1)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    for each in [start(at, two, **world, RANK=str(rank)) for rank, at in enumerate(two)]:
        said = each.error()
        assert f"UsageError: rank 0 of this process group is at {two[0]}" in said, said
        assert "mend.rack_mesh()" in said


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "mend", "version"]
    said = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert said.stdout.startswith("mend=")


# ------------------------------------------------------------------ what only a loud line says


def test_rounds_that_leave_a_live_rack_out_and_buffers_that_differ_are_told(
    nursery: Nursery, tmp_path: Path, two: list[str]
) -> None:
    """A rack ten times slower beside a fast one that waits for nobody: every round had one member,
    and the only sign was the reason of the newest."""
    common = {
        "MEND_SIDEBAND_PEERS": ",".join(two), "MEND_SYNC_PERIOD_STEPS": "8",
        "MEND_OVERLAP_STEPS": "2", "MEND_FRAGMENTS": "1", "MEND_GRACE_WINDOW_MS": "0",
        "MEND_RACKS": "2", "MEND_DIAGNOSTICS_DIR": str(tmp_path / "run"),
        "MEND_EXCHANGE_STATISTICS": "false",
    }  # fmt: skip
    racks = []
    for rack, (pace, steps) in enumerate([("5", "240"), ("50", "24")]):
        out = tmp_path / f"rack{rack}.json"
        argv = ["tests.process.uneven", str(out), pace, steps]
        env = environment(**common, MEND_RACK=str(rack))
        racks.append(Started(Forked(nursery, argv, env, out.with_suffix(".log")), out))
    said = [rack.said() for rack in racks]
    for rack, (told, one) in enumerate(zip(said, racks, strict=True)):
        text = one.process.log.read_text(encoding="utf-8")
        counts = {int(members): rounds for members, rounds in told["rounds_by_racks"].items()}
        assert counts[1] > counts.get(2, 0), counts
        assert sum(members < live for members, live in told["rounds_recent"]) > 0
        assert text.count(f"mend rack={rack} rank=0 rounds-short") == 1, text
        assert "rounds merged 1 of 2 live racks" in text
        assert "docs/tuning.md, Are the racks merged together" in text
        assert text.count("running statistics are not exchanged, each rack keeps its own: 1") == 1
        assert text.count("buffers-changed") == 1
        assert "0.parametrizations.weight.0._u" in text
    events = (tmp_path / "run" / "events-rack0-rank0.jsonl").read_text(encoding="utf-8")
    reasons = {
        event["reason"] for line in events.splitlines()
        if (event := json.loads(line))["kind"] == "commit" and len(event["members"]) == 1
    }  # fmt: skip
    assert not any(reason.startswith("all-in, 2") for reason in reasons), reasons
