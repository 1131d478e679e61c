"""The benchmark of racks with GPUs, on this CPU: the same code at a size that takes seconds.

No test looks at a time. What is looked at: that both racks run the same cells to the end, that the
exchange took place in them, and that overlapping it changes no bit of the losses.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.racks import ROOT, Nursery, run_mend, run_module

TINY = (
    *("--shape", "tiny", "--sequences", "2", "--positions", "16", "--fragments", "4"),
    *("--gap", "2", "--steps-max", "8", "--repeats", "1"),
)


def launched(nursery: Nursery, folder: Path, ranks: int, *more: str, script: str = "h200") -> None:
    launch(nursery, ranks, f"{script}.py", "--out", str(folder), *TINY, *more)


def launch(nursery: Nursery, ranks: int, script: str, *words: str) -> str:
    """Two racks of so many ranks; what they printed."""
    racks = ("--no-witness", "--racks", "2", "--nproc-per-rack", str(ranks))
    status, said = run_mend(nursery, "launch", *racks, ROOT / "benchmarks" / script, *words)
    assert status == 0, said
    return said


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(folder: Path, *more: str) -> str:
    status, said = run_module(sys.executable, "benchmarks.h200_table", folder, *more)
    assert status == 0, said
    return said


@pytest.mark.slow
def test_two_racks_run_every_cell_from_the_same_start(nursery: Nursery, tmp_path: Path) -> None:
    launched(nursery, tmp_path, 1, "--delays", "0,30", "--recompute")
    both = [lines(tmp_path / f"rack{rack}-rank0.jsonl") for rack in range(2)]
    cells = [[line for line in one if line["kind"] == "cell"] for one in both]
    modes = [(line["mode"], line["delay_ms"]) for line in cells[0] if line["repeat"] == 0]
    assert modes == [
        ("none", 0), ("blocking", 0), ("concurrent", 0), ("blocking", 30), ("concurrent", 30),
    ]  # fmt: skip
    for mine, theirs in zip(*cells, strict=True):
        assert mine["losses"][0] == cells[0][0]["losses"][0], "a cell began elsewhere"
        assert mine["losses"] != theirs["losses"], "the racks trained on the same tokens"
        assert len(mine["step_ms"]) == mine["measured"]
        if mine["mode"] != "none":
            assert mine["bytes_sent"] > 0
            assert mine["anchor_digest"] == theirs["anchor_digest"]
            assert sum(mine["versions"]) == (mine["warm_up"] + mine["measured"] - mine["tau"]) // 2
    assert both[0][-1]["reason"] == "done"
    said = table(tmp_path)
    assert said.count("losses of blocking and concurrent equal") == 2, said
    assert "| concurrent | 30 |" in said


@pytest.mark.slow
def test_racks_of_shards_do_the_same_with_two_ranks_each(nursery: Nursery, tmp_path: Path) -> None:
    launched(nursery, tmp_path, 2, "--parallel", "fsdp2", "--delays", "20", "--tau", "2")
    assert len(list(tmp_path.glob("rack*-rank*.jsonl"))) == 4
    said = table(tmp_path)
    assert "2 racks x 2" in said
    assert "delay 20 ms: losses of blocking and concurrent equal" in said


@pytest.mark.parametrize("words", [(), ("--parallel", "fsdp2")], ids=["single", "fsdp2"])
def test_torchft_and_mend_take_turns_where_torchft_is_installed(
    nursery: Nursery, tmp_path: Path, words: tuple[str, ...]
) -> None:
    pytest.importorskip("torchft")
    ranks = 2 if words else 1
    repeats = ("--repeats", "2", "--gap", "4", "--payload", "bfloat16")
    launched(nursery, tmp_path, ranks, *repeats, *words, script="torchft_cell")
    places = [(rack, rank) for rack in range(2) for rank in range(ranks)]
    every = [lines(tmp_path / f"rack{rack}-rank{rank}.jsonl") for rack, rank in places]
    for cells in ([one for one in each if one["kind"] == "cell"] for each in every):
        turns = ["blocking", "concurrent", "torchft-blocking", "torchft-overlap"]
        modes = [one["mode"] for one in cells]
        assert modes == ["none", *turns, "none", *turns[::-1]]
        assert all(one["bytes_sent"] > 0 for one in cells if one["mode"] != "none")
        losses = {one["mode"]: one["losses"] for one in cells[:5]}
        assert losses["torchft-overlap"] != losses["torchft-blocking"]
        assert all(one["losses"] == losses[one["mode"]] for one in cells[5:]), "a cell was unclean"
    said = table(tmp_path)
    assert all(f"| {mode} | 0 |" in said for mode in turns)
    assert said.count("losses of blocking and concurrent equal") == 2


@pytest.mark.slow
def test_bus_benchmark_moves_bytes_beside_every_cell_but_the_first(
    nursery: Nursery, tmp_path: Path
) -> None:
    launched(nursery, tmp_path, 1, "--delays", "0", script="h200_bus")
    for rack in range(2):
        cells = [each for each in lines(tmp_path / f"rack{rack}-rank0.jsonl") if "load" in each]
        assert [each["load"] for each in cells] == ["none", "up", "paced", "down", "bursts"]
        assert [each["moved_bytes"] > 0 for each in cells] == [False, True, True, True, True]
        assert len({tuple(each["losses"]) for each in cells}) == 1


def test_a_run_ends_before_its_budget_and_all_racks_at_the_same_cell(
    nursery: Nursery, tmp_path: Path
) -> None:
    launched(nursery, tmp_path, 1, "--delays", "0", "--budget-s", "0.1")
    for rack in range(2):
        found = lines(tmp_path / f"rack{rack}-rank0.jsonl")
        assert [line["kind"] for line in found] == ["start", "end"]
        assert found[-1]["reason"] == "budget"
    assert "0 cells (budget)" in table(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_tensor_parallel_rack_trains_alike_with_async_tp_and_says_why_it_is_not_active(
    nursery: Nursery, tmp_path: Path
) -> None:
    words = ("--env", "CUDA_VISIBLE_DEVICES=", ROOT / "benchmarks" / "tensor_parallel.py")
    racks = ("--no-witness", "--racks", "2", "--nproc-per-rack", "2")
    status, told = run_mend(nursery, "launch", *racks, *words, "--out", tmp_path, *TINY)
    assert status == 0, told
    said = [line.partition("] ")[2] for line in told.splitlines()]
    (found,) = [json.loads(line) for line in said if line.startswith("{")]
    none, off, on = (found["modes"][mode] for mode in ("none", "off", "on"))
    assert (off["async_tp"], on["async_tp"]) == (["off"], ["not active: there is no CUDA device"])
    assert off["versions"] == on["versions"] == [[1, 1, 1, 0]]
    assert off["bytes_sent"][0] > 0 < on["bytes_sent"][0]
    assert none["losses"][0] == off["losses"][0]
    assert none["losses"] != off["losses"], "the peer's offers were not merged"
    assert found["loss_apart"] == 0.0, "the same kernels: the same losses"
    assert none["graphs"] == off["graphs"] == on["graphs"] == [2], "a block was not compiled"


@pytest.mark.slow
def test_long_run_ends_with_equal_digests(nursery: Nursery) -> None:
    words = ("--minutes", "0.05", "--every-s", "1", "--shape", "tiny", "--sequences", "2")
    told = launch(nursery, 1, "long_run.py", *words, "--positions", "16")
    said = [line.partition("] ")[2] for line in told.splitlines()]
    ends = [json.loads(line) for line in said if line.startswith("{") and '"outcome"' in line]
    assert [end["outcome"] for end in ends] == ["merged", "merged"]
    assert len({end["digest"] for end in ends}) == 1
