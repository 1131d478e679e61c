"""`mend repro` on a script that knows nothing of it: two runs, and the operator that parts them.

The commands are run in this process; what they start is forked from one that has torch loaded, but
for one test, whose script is started as users do.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mend.errors import MendError
from mend.tools import app, repro_runs
from tests.process.racks import ROOT, environment, until

SCRIPT = ["--", "-m", "tests.process.planted"]


def repro(*arguments: str) -> tuple[int, str]:
    """Status and stdout."""
    done = invoke(*arguments)
    return done.exit_code, done.stdout


def invoke(*arguments: str) -> Result:
    done = CliRunner().invoke(app, ["repro", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def found(*arguments: str) -> dict[str, Any]:
    status, said = repro("--json", *arguments)
    verdict: dict[str, Any] = json.loads(said)
    assert status == int(not verdict["equal"])
    return verdict


@pytest.mark.usefixtures("warm")
def test_an_atomic_add_is_found_over_two_ranks(tmp_path: Path) -> None:
    verdict = found("--nproc", "2", "--keep", str(tmp_path), *SCRIPT, "--fault", "atomic")
    assert (verdict["ranks"], verdict["pairs"]) == ([2, 2], 2)
    finding = verdict["finding"]
    assert (finding["step"], finding["direction"], finding["module"]) == (2, "forward", "tokens")
    assert finding["operator"] == "planted.atomic_sum.default"
    assert "order depends on threads or time" in finding["cause"]
    assert (tmp_path / "B-operators" / "rank-1.jsonl").exists()
    status, said = repro(str(tmp_path / "A-operators"), str(tmp_path / "B-operators"))
    assert status == 1
    assert "    operator   planted.atomic_sum.default\n" in said


SETTINGS = {
    "ranks: 1 and 2": ("--a-nproc", "0", "--b-nproc", "2"),
    "microbatches": ("--a-args", "--microbatches 1", "--b-args", "--microbatches 4"),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("differs", SETTINGS)
def test_an_operator_that_depends_on_the_batch_is_found_between_settings(differs: str) -> None:
    command = [*SCRIPT, "--fault", "batch", "--fault-step", "1", "--steps", "1"]
    verdict = found(*SETTINGS[differs], *command)
    finding = verdict["finding"]
    assert (finding["step"], finding["module"]) == (1, "tokens")
    assert finding["operator"] == "planted.batch_sum.default"
    assert verdict["facts"] == ([differs] if "ranks" in differs else [])


@pytest.mark.usefixtures("warm")
def test_the_fault_of_the_example_is_found() -> None:
    finding = found("--", str(ROOT / "examples" / "find_difference.py"), "--steps", "1")["finding"]
    assert (finding["module"], finding["operator"]) == ("1", "aten.randperm.generator")
    assert "random numbers" in finding["cause"]


@pytest.mark.usefixtures("warm")
def test_equal_runs_and_runs_that_fail() -> None:
    assert found("--steps", "2", *SCRIPT)["steps"] == 2
    with pytest.raises(MendError, match=r"run A \(1 of 2\) ended with status 2:\n(.|\n)*--fault"):
        repro(*SCRIPT, "--fault", "unknown")
    with pytest.raises(MendError, match="no step of a torch optimizer"):
        repro(*SCRIPT, "--steps", "0")


HANGS = """
import threading, torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], 0.1)
try:
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
finally:
    threading.Event().wait()
"""


@pytest.mark.usefixtures("warm")
def test_a_script_that_hangs_behind_its_last_step_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of two ranks did once, in destroy_process_group(): the command waited for ever."""
    monkeypatch.setattr(repro_runs, "END_S", 2.0)  # in which it comes to where it hangs
    (tmp_path / "hangs.py").write_text(HANGS)
    done = invoke("--steps", "2", "--", str(tmp_path / "hangs.py"))
    assert done.exit_code == 0
    for name in ("A (1 of 2)", "B (2 of 2)"):
        assert f"repro: run {name}: killed 2 s after step 2, its last step\n" in done.stderr
    assert done.stderr.count('hangs.py", line 10 in <module>\n') == 2
    assert done.stdout == "equal: 2 steps: losses, gradients, weights, optimizer\n"


def test_one_run_is_recorded_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The real command, stopped while its script would train for ever."""
    words = [*("repro", "--record", str(tmp_path)), *SCRIPT, "--steps", "1000000"]
    command = subprocess.Popen(
        [sys.executable, "-m", "mend.tools", *words], cwd=ROOT, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    recording = tmp_path / "rank-0.jsonl"
    until(lambda: recording.exists() and recording.read_text().count("\n") > 3, "it trains")
    command.send_signal(signal.SIGINT)
    said, _ = command.communicate(timeout=60)
    assert command.returncode == 130, said
    assert said.splitlines()[-1] == "repro: stopped"
    assert json.loads(recording.read_text().splitlines()[2])["step"] == 2
    words_of_all = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [words for words in words_of_all if str(tmp_path).encode() in words]
