"""Every example does what it says: both racks end well, on the same bits, and say what they got."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mend.tools.keys_command import create
from mend.tools.processes import TOKEN, orphans
from mend.tools.report.read import read_run
from mend.transport.security import SECRET_BYTES
from tests.process.racks import LIMIT_S, ROOT, Nursery, environment, until

EXAMPLES = ROOT / "examples"
RESULT = re.compile(r"rack=(\d) step=(\d+) versions=([\d,]+) digest=([0-9a-f]{64}) \w+=([\d.]+)")

FreePorts = Callable[[int], list[int]]


@dataclass(frozen=True)
class End:
    """The last line of a rack."""

    rack: int
    step: int
    versions: tuple[int, ...]
    digest: str
    loss: float


def with_torchrun(python: str, **more: str) -> dict[str, str]:
    """An environment in which the shell finds this Python's torchrun."""
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    return environment(PATH=path, **more)


def ends(*command: str, python: str, **more: str) -> list[End]:
    """Run to the end, which must be a good one; what the racks said last, by rack."""
    done = subprocess.run(
        command, cwd=ROOT, env=with_torchrun(python, **more), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr + done.stdout, done.stdout + done.stderr
    assert "destroy_process_group" not in done.stdout + done.stderr, "a group was left open"
    found = [
        End(int(rack), int(step), tuple(map(int, versions.split(","))), digest, float(loss))
        for rack, step, versions, digest, loss in RESULT.findall(done.stdout)
    ]
    return sorted(found, key=lambda end: end.rack)


def launched(
    python: str, example: str, *arguments: str, ranks: int = 2, racks: int = 2
) -> list[End]:
    return ends(
        python, "-m", "mend.tools", "launch", "--racks", str(racks), "--nproc-per-rack", str(ranks),
        str(EXAMPLES / example), *arguments, python=python,
    )  # fmt: skip


def agree(found: list[End], steps: int) -> None:
    assert [end.rack for end in found] == [0, 1], found
    first, second = found
    assert first.step == second.step == steps
    assert all(version > 0 for version in first.versions), "every fragment was merged"
    assert (first.versions, first.digest, first.loss) == (
        second.versions,
        second.digest,
        second.loss,
    )


@pytest.mark.slow
def test_minimal_example_ends_on_equal_bits() -> None:
    """The one here that runs as it does for a user, with interpreters of its own. In a job that
    ends before its racks have met in a round their work may add up (docs/internals/numerics.md),
    and 100 steps take a tenth of a second."""
    found = launched(sys.executable, "minimal.py", "--steps", "1000", ranks=1)
    agree(found, 1000)
    assert found[0].loss < 0.5, "the truth is half learnt"


def test_a_time_limit_stops_all_racks_with_a_checkpoint_and_the_next_run_goes_on(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Each rack looks at its own clock; they meet in the checkpoint."""
    folder = ("--folder", str(tmp_path))
    first = launched(nursery.python, "wall_limit.py", "--limit-s", "1", *folder)
    (cut,) = tmp_path.iterdir()
    steps = [json.loads((cut / f"rack-{r}/manifest.json").read_bytes())["step"] for r in (0, 1)]
    assert [end.step for end in first] == steps
    last = ("--steps", str(max(steps) + 100))
    agree(launched(nursery.python, "wall_limit.py", *last, *folder), max(steps) + 100)
    assert list(tmp_path.iterdir()) == [cut]


def test_wall_limit_with_a_rack_that_was_dead_at_the_checkpoint_goes_on(
    nursery: Nursery, tmp_path: Path
) -> None:
    """It has no part of the checkpoint, and begins with the merged weights."""
    folder = ("--folder", str(tmp_path))
    first = launched(nursery.python, "wall_limit.py", "--limit-s", "1", *folder, ranks=1)
    steps = str(max(end.step for end in first) + 100)
    found = launched(nursery.python, "wall_limit.py", "--steps", steps, *folder, ranks=1, racks=3)
    assert [(end.rack, str(end.step)) for end in found] == [(rack, steps) for rack in range(3)]
    assert len({(end.versions, end.digest) for end in found}) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda each: each.name)
def test_a_signal_to_all_racks_ends_with_a_checkpoint_and_a_merge(
    nursery: Nursery, tmp_path: Path, free_ports: FreePorts, number: signal.Signals
) -> None:
    """As a scheduler sends it; without a torchrun between."""
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    more = {
        "MEND_RACKS": "2", "MEND_JOB_ID": "ends", "MEND_SIDEBAND_PEERS": ",".join(addresses),
        "MEND_DIAGNOSTICS_DIR": str(tmp_path / "events"),
    }  # fmt: skip
    command = [nursery.python, str(EXAMPLES / "wall_limit.py"), "--steps", "1000000000"]
    racks = [
        subprocess.Popen(
            [*command, "--folder", str(tmp_path / "cuts")], cwd=ROOT, stdout=subprocess.PIPE,
            env=environment(MEND_RACK=str(rack), MEND_SIDEBAND_ADDR=addresses[rack], **more),
        )
        for rack in (0, 1)
    ]  # fmt: skip
    try:
        events = [tmp_path / "events" / f"events-rack{rack}-rank0.jsonl" for rack in (0, 1)]
        for path in events:
            until(lambda path=path: _says(path, '"applied"'), "the rack trains")  # type: ignore[misc]
        for process in racks:
            process.send_signal(number)
        said = [process.communicate(timeout=LIMIT_S)[0].decode() for process in racks]
    finally:
        for process in racks:
            process.kill()
            process.wait()
    assert [process.returncode for process in racks] == [0, 0]
    assert all("(stopped)" in each for each in said), said
    assert (tmp_path / "cuts" / "stop-ends" / "rack-1" / "COMPLETE").exists()
    assert all(_says(path, '"outcome":"merged"') for path in events)


@pytest.mark.slow
def test_a_rack_that_joins_makes_only_the_steps_that_are_left(
    nursery: Nursery, tmp_path: Path, free_ports: FreePorts
) -> None:
    """It made all its steps once more, and trained on alone when the other rack had ended. In its
    second life this one has fewer steps to make than the other has made, so none is left."""
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    more = {
        "MEND_RACKS": "2", "MEND_JOB_ID": "joins", "MEND_SIDEBAND_PEERS": ",".join(addresses),
        "MEND_DIAGNOSTICS_DIR": str(tmp_path),
    }  # fmt: skip

    def start(python: str, rack: int, steps: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [python, str(EXAMPLES / "minimal.py"), "--steps", str(steps)], cwd=ROOT,
            env=environment(MEND_RACK=str(rack), MEND_SIDEBAND_ADDR=addresses[rack], **more),
            stdout=subprocess.PIPE,
        )  # fmt: skip

    racks = [start(sys.executable, rack, 10**9) for rack in (0, 1)]
    events = [tmp_path / f"events-rack{rack}-rank0.jsonl" for rack in (0, 1)]
    try:
        for path in events:
            until(lambda path=path: _says(path, '"applied"'), "the rack trains")  # type: ignore[misc]
        racks[1].kill()
        racks[1].wait()
        racks.append(start(nursery.python, 1, 1))
        until(lambda: _says(events[1], '"kind":"leaving"'), "the rack has joined and is done")
    finally:
        for process in racks:
            process.kill()
            process.communicate()
    noted = [json.loads(line) for line in events[1].read_text().splitlines()]
    joined = next(i for i, each in enumerate(noted) if each["kind"] == "state-copied")
    assert noted[joined]["step"] > 1
    trained = [each for each in noted[joined:] if each["kind"] == "progress"]
    assert not trained, "the rack has trained further"


def _says(path: Path, what: str) -> bool:
    return path.exists() and what in path.read_text().replace(": ", ":")


def test_ddp_example_ends_on_equal_bits(nursery: Nursery) -> None:
    agree(launched(nursery.python, "ddp.py", "--steps", "24"), 24)


def loaded(example: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_fsdp2_saves_a_model_that_one_process_can_load(nursery: Nursery, tmp_path: Path) -> None:
    """Made of shards, evaluated between steps, merged: the file holds what the racks evaluated."""
    path = tmp_path / "merged.pt"
    evaluated = ("--evaluate-every", "7", "--save", str(path))
    found = launched(nursery.python, "fsdp2.py", "--steps", "24", *evaluated)
    agree(found, 24)
    module = loaded("fsdp2")
    model = module.ByteGPT()
    model.load_state_dict(torch.load(path, weights_only=True))
    held_out = module.text(2, 3)
    alone = module.held_out_loss(model, held_out, torch.device("cpu"))
    assert alone == pytest.approx(found[0].loss, abs=2e-4)


@pytest.mark.slow
def test_pipeline_inside_each_rack(nursery: Nursery) -> None:
    agree(launched(nursery.python, "pipeline.py", "--steps", "96"), 96)


@pytest.mark.slow
def test_one_torchrun_over_both_racks(nursery: Nursery, free_ports: FreePorts) -> None:
    first, second = free_ports(2)
    peers = f"0=tcp://127.0.0.1:{first},1=tcp://127.0.0.1:{second}"
    found = ends(
        nursery.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        str(EXAMPLES / "one_torchrun.py"), "--steps", "24", python=nursery.python,
        MEND_RANKS_PER_RACK="2", MEND_SIDEBAND_PEERS=peers,
    )  # fmt: skip
    agree(found, 24)


@pytest.mark.slow
def test_follower_prints_losses_of_merged_models_while_a_job_trains(
    nursery: Nursery, free_ports: FreePorts, tmp_path: Path
) -> None:
    """It begins before the job does. The truth has a loss of 0.25."""
    create(tmp_path / "key", (os.urandom(SECRET_BYTES),), "# of a test\n")
    token, port = os.urandom(8).hex(), ports_in_a_row(free_ports)
    events = tmp_path / "events"
    environ = environment(
        MEND_KEY_FILE=str(tmp_path / "key"), MEND_DIAGNOSTICS_DIR=str(events), **{TOKEN: token}
    )
    follow = [str(EXAMPLES / "follow_loss.py"), f"tcp://127.0.0.1:{port}", "--record", str(events)]
    job = ["-m", "mend.tools", "launch", "--no-witness", "--base-port", port]
    job += [str(EXAMPLES / "minimal.py"), "--steps", "1000000000"]
    logs = [tmp_path / "follower.log", tmp_path / "job.log"]
    started = []
    for command, log in zip((follow, job), logs, strict=True):
        with log.open("w") as out:
            started.append(
                subprocess.Popen(
                    [nursery.python, *command], cwd=ROOT, env=environ, stdout=out, stderr=out
                )
            )
    line = re.compile(r"version=(\d+) step=\d+ loss=([\d.]+)\n")

    def found() -> list[tuple[str, str]]:
        return line.findall(logs[0].read_text())

    try:
        until(
            lambda: bool(found()) and float(found()[-1][1]) < 0.3,
            lambda: "\n".join(log.read_text() for log in logs),
        )
    finally:
        for process in started:
            process.kill()
            process.wait()
        for pid in orphans(token):
            os.kill(pid, signal.SIGKILL)
    versions = [int(version) for version, _ in found()]
    assert versions == sorted(set(versions))
    curve = read_run(events).ranks[0, 0].curves["held_out_merged"]
    assert min(curve.values) < 0.3


def ports_in_a_row(free_ports: FreePorts) -> str:
    """The script wants two, and a range for the lanes a hundred above."""
    found = sorted(free_ports(16))  # neighbours, but for those that somebody holds
    return str(next(low for low, high in itertools.pairwise(found) if high == low + 1))


def test_two_torchruns_and_nothing_else(nursery: Nursery, free_ports: FreePorts) -> None:
    script, example = str(EXAMPLES / "two_racks.sh"), str(EXAMPLES / "ddp.py")
    beside = {"PORT": ports_in_a_row(free_ports), "NPROC": "1"}
    agree(ends(script, example, "--steps", "24", python=nursery.python, **beside), 24)


def test_one_interrupt_ends_both_racks(nursery: Nursery, free_ports: FreePorts) -> None:
    """Like Ctrl-C, which reaches the script and not the torchruns in their groups."""
    token = os.urandom(8).hex()
    more = {"PORT": ports_in_a_row(free_ports), "NPROC": "1", TOKEN: token}
    command = [str(EXAMPLES / "two_racks.sh"), str(EXAMPLES / "ddp.py"), "--steps", "1000000"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=with_torchrun(nursery.python, **more), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Where this test runs in the background, SIGINT is ignored, and a shell keeps it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    said, limit = b"", time.monotonic() + LIMIT_S
    try:
        while not (b"rack=0 step=" in said and b"rack=1 step=" in said):
            assert select.select([process.stdout], [], [], limit - time.monotonic())[0], said
            chunk = os.read(process.stdout.fileno(), 65536)
            assert chunk, f"ended, having said only:\n{said.decode()}"
            said += chunk
        process.send_signal(signal.SIGINT)
        said += process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == 128 + signal.SIGINT, said.decode()
        until(lambda: not orphans(token), "no process is left behind")
    finally:
        process.kill()
        process.communicate()
        for pid in orphans(token):
            os.kill(pid, signal.SIGKILL)
