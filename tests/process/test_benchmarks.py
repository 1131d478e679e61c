"""Every benchmark runs, at a size that takes seconds, and prints the JSON that the results hold. No
test looks at a time."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks._run import ROWS
from tests.process.racks import LIMIT_S, ROOT, Nursery

KEYS = {
    *("name", "goal", "better", "unit", "measured", "spread", "samples", "limit", "pass"),
    *("parameters", "machine", "command"),
}
MACHINE_KEYS = {"cpu", "cores", "memory_gb", "load_1min", "torch", "python", "system"}
ROWS_BY_NAME = {row.name: row for row in ROWS}
TINY = {name: row.quick.split() for name, row in ROWS_BY_NAME.items()}
"""What `mend bench run --quick` gives them."""

ELSEWHERE = {
    "claims": "tests/unit/benchmarks/test_claims.py",
    "data_parallel": "tests/process/test_loss.py",
    "determinism_gpu": "tests/unit/benchmarks/test_determinism_gpu.py",
    "determinism_digests": "tests/unit/benchmarks/test_determinism_gpu.py",
    "determinism_ops": "tests/gpu/test_determinism.py", "loss": "tests/process/test_loss.py",
    "small_problems": "tests/unit/test_small_problems.py",
    "small_problems_batch": "tests/unit/test_small_problems.py",
    "small_problems_gpt": "tests/unit/test_small_problems.py",
    "small_problems_rank": "tests/process/test_loss.py", "long_run": "tests/process/test_h200.py",
    "determinism": "tests/process/test_benchmarks.py", "device_encode": "tests/gpu/test_cuda.py",
    "encode": "tests/process/test_benchmarks.py", "exchange": "tests/process/test_benchmarks.py",
    "tape": "tests/process/test_benchmarks.py", "kill": "tests/unit/test_bench_failures.py",
    "straggler": "tests/unit/test_bench_failures.py",
    "unequal": "tests/unit/test_bench_failures.py",
    "unequal_loss": "tests/unit/test_small_problems.py", "compare": "tests/unit/test_compare.py",
    "failslow": "tests/unit/detector/test_scores.py",
    "mitigation": "tests/unit/test_bench_mitigation.py",
    "peers": "tests/process/test_benchmarks.py", "qwen": "tests/process/test_h200.py",
    "rejoin": "tests/process/test_rejoin.py", "repro_cost": "tests/process/test_benchmarks.py",
    "torchft_cell": "tests/process/test_h200.py", "tensor_parallel": "tests/process/test_h200.py",
    "qwen_parallel": "tests/process/test_h200.py",
}  # fmt: skip
"""Modules that are not run here, and who tries them. Kill, straggler, unequal and rejoin
start the same racks in the same way, so one of the four is enough, rejoin. Exchange needs root
and iperf3, or a minute (`--paced`): only its help is asked for here."""


def tried_elsewhere(name: str) -> bool:
    """The h200 and quality modules are benchmarks of their own, with tests of their own."""
    return name in ELSEWHERE or name.startswith(("h200", "quality"))


def run(nursery: Nursery, *words: str, cwd: Path = ROOT) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [nursery.python, "-m", *words],
        cwd=cwd, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "160"}, text=True,
        capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_benchmark_is_tried_somewhere() -> None:
    found = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    assert {name for name in found if not tried_elsewhere(name)} == set(TINY) - set(ELSEWHERE)
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TINY) - set(ELSEWHERE)))
def test_benchmark_prints_one_json_object_with_what_a_result_needs(
    name: str, nursery: Nursery
) -> None:
    found = json.loads(run(nursery, f"benchmarks.{name}", *TINY[name]))
    assert found.keys() >= KEYS
    assert found["name"] == name
    assert isinstance(found["pass"], bool)
    assert found["measured"] in (found["spread"]["median"], found["spread"]["max"])
    assert found["better"] in ("lower", "higher")
    assert found["limit"] is None or found["limit"].keys() >= {"what", "unit", "median"}
    assert found["machine"].keys() == MACHINE_KEYS
    assert found["command"] == " ".join([f"python -m benchmarks.{name}", *TINY[name]])
    if name == "outer_sync":
        all_parts_took_time(found)
    if name == "stall":
        assert found["at_steps_ms"]["apply"]["max"] > found["at_steps_ms"]["other"]["min"]


def all_parts_took_time(found: dict[str, Any]) -> None:
    """A sync that skipped its parts would be the fastest of all."""
    parts = found["cpu_ms"]
    assert all(parts[name] > 0 for name in ("capture", "merge", "apply", "rest")), parts


@pytest.mark.parametrize("name", sorted({*TINY, "peers", "determinism", "exchange"}))
def test_help_teaches_how_to_read_the_figures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as left:
        module.main()
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert f"python -m benchmarks.{name}" in said
    assert "`measured` is" in said
    assert "--save" in said or name == "peers"


@pytest.mark.slow
def test_a_step_with_equal_bits_is_measured_beside_a_plain_one(nursery: Nursery) -> None:
    words = ["benchmarks.determinism", "--layers", "1", "--blocks", "1", "--steps", "1"]
    found = json.loads(run(nursery, *words))
    assert found["name"] == "determinism"
    assert found["measured"] > 1, "it costs more"


@pytest.mark.slow
def test_a_comparing_run_is_measured_beside_a_plain_one(nursery: Nursery, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    words = ["--tiny", "--pairs", "1", "--steps", "5", "--out", str(out)]
    said = run(nursery, "benchmarks.repro_cost", *words)
    assert "equal: 5 steps" in said
    found = json.loads(out.read_text())
    assert all(len(found[name]) == 1 for name in ("plain_ms", "comparing_ms", "comparing_s"))
    assert found["step"] > 0


@pytest.mark.slow
def test_two_rows_are_measured_and_a_peer_beside_them(nursery: Nursery, tmp_path: Path) -> None:
    """`mend bench run` as a command."""
    out = tmp_path / "bench.json"
    words = ["bench", "run", "--quick", "encode", "tape", "--out", str(out)]
    said = run(nursery, "mend.tools", *words, cwd=tmp_path)
    assert "memcpy, 1 thread: " in said
    assert "not judged" in said
    encode, tape = json.loads(out.read_text())["rows"]
    speed = encode["variants"]["float32 offer"]["GBps"]
    assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    assert tape["bytes_per_event"] > 0
    theirs = encode["peers"]["tsugi-mend"]
    try:
        metadata.version("tsugi-mend")
    except metadata.PackageNotFoundError:
        assert "pip install" in theirs["absent"]
        assert "not installed: tsugi-mend" in said
    else:
        assert theirs["measured"] > 0
