"""What level shape costs on a GPU: training steps of GPT-2 124M and of a Llama of 1.1B parameters
beside plain torch and torch.compile.

    python -m benchmarks.determinism_gpu --out result.json

GPT's weights are fp32 and its layers compute in bf16 (autocast); Llama's weights are bf16. AdamW is
fused. A step is forward, backward and optimizer. "device": replays of a CUDA graph, in which the
host costs nothing; "eager": wall time of calls; "trainer": wall time of DeterministicTrainer.step
beside a plain step, with and without its setting `cuda_graph`; "everywhere": the same of level
everywhere and a plain step, both in fp32 (GPT-2, 8 rows). The variants take turns, and medians with
quartiles over the rounds are given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import torch
from torch import Tensor, nn

from benchmarks._determinism_models import Gpt, Llama, loss_in_bf16, loss_of
from mend.determinism import DeterministicTrainer, enable, rows

SHAPES: dict[str, tuple[Callable[[], nn.Module], torch.dtype, int, int, int]] = {
    "GPT-2 124M, 16 x 1024": (Gpt, torch.float32, 16, 1024, 2),
    "Llama 1.1B, 8 x 2048": (Llama, torch.bfloat16, 8, 2048, 4),
}
"""Model, type of its weights, rows, tokens, rows of a leaf: 8 leaves and 2 leaves."""
FUSED: dict[Any, Callable[[], nn.Module]] = {Llama: partial(Llama, fused=True)}
"""What level shape trains in place of it: with @elementwise functions."""
EVERYWHERE = "GPT-2 124M, 8 x 1024, everywhere"

Step = Callable[[], Any]


def step_of(
    make: Callable[[], nn.Module], dtype: torch.dtype, words_BT: Tensor, *, compiled: bool = False
) -> Step:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make().to(dtype)
    loss = loss_in_bf16 if dtype == torch.float32 else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=True)
    called = torch.compile(model, dynamic=False) if compiled else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(called, words_BT).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def captured(step: Step, pool: Any) -> Step:
    """`pool`: the graphs' memory. They run one after another, so they share it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph.replay


def milliseconds(step: Step, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / count


def measured(steps: dict[str, Step], rounds: int, count: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, count))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    found = {}
    for name, taken in times.items():
        ratios = [one / plain for one, plain in zip(taken, times["plain"], strict=True)]
        found[name] = {
            "ms": round(statistics.median(taken), 2),
            "ms_quartiles": [round(each, 2) for each in statistics.quantiles(taken)[::2]],
            "of_plain": round(statistics.median(ratios), 3),
        }
    return found


def compare(name: str, rounds: int) -> dict[str, Any]:
    make, dtype, count, tokens, leaf_rows = SHAPES[name]
    vocabulary = 50257 if make is Gpt else 32768
    words_BT = torch.randint(0, vocabulary, (count, tokens + 1), device="cuda")
    eager = {
        kind: step_of(make, dtype, words_BT, compiled=kind == "compiled")
        for kind in ("plain", "compiled")
    }
    for step in eager.values():
        for _ in range(3):
            step()
    wall = measured(eager, rounds, 2)
    pool = torch.cuda.graph_pool_handle()
    steps = {kind: captured(step, pool) for kind, step in eager.items()}
    with ExitStack() as stack:
        stack.enter_context(enable(7, level="shape", leaf_rows=leaf_rows))
        stack.enter_context(rows(0, count))
        shape = step_of(FUSED.get(make, make), dtype, words_BT)
        for _ in range(3):
            shape()
        wall["shape"] = measured({"shape": shape}, rounds, 2)["shape"]
        steps["shape"] = captured(shape, pool)
        device = measured(steps, rounds, 3)
    return {
        "device": summary(device),
        "eager": summary(wall),
        "leaves": count // leaf_rows,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def compare_trainers(name: str, rounds: int) -> dict[str, Any]:
    make, dtype, count, tokens, leaf_rows = SHAPES[name]
    loss = loss_in_bf16 if dtype == torch.float32 else loss_of
    vocabulary = 50257 if make is Gpt else 32768
    words_BT = torch.randint(0, vocabulary, (count, tokens + 1), device="cuda")
    steps = {"plain": step_of(make, dtype, words_BT)}
    for _ in range(3):
        steps["plain"]()
    plain = measured(steps, rounds, 3)  # before torch's kernels are replaced
    with enable(7, level="shape", leaf_rows=leaf_rows):
        for kind in ("eager", "cuda_graph"):
            torch.manual_seed(0)
            with torch.device("cuda"):
                model = FUSED.get(make, make)().to(dtype)
            trainer = DeterministicTrainer(
                model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), 7,
                level="shape", cuda_graph=kind == "cuda_graph",
            )  # fmt: skip
            steps[kind] = partial(trainer.step, words_BT, loss)
            for _ in range(4):
                steps[kind]()
        if trainer._graphs is None or trainer._graphs.why_not:
            raise SystemExit(f"no step was replayed: {trainer._graphs}")
        del steps["plain"]
        times = {**plain, **measured(steps, rounds, 3)}
    return {**summary(times), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)}


def compare_everywhere(model: nn.Module, count: int, tokens: int, rounds: int) -> dict[str, Any]:
    words_BT = torch.randint(0, 50257, (count, tokens + 1), device="cuda")
    plain = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        plain.zero_grad(set_to_none=True)
        loss_of(model, words_BT).backward()  # type: ignore[no-untyped-call]
        plain.step()

    step()
    times = measured({"plain": step}, rounds, 3)  # before torch's kernels are replaced
    plain.state.clear()  # its memory
    with enable(7, level="everywhere"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        trainer = DeterministicTrainer(model, optimizer, 7, level="everywhere")
        everywhere = partial(trainer.step, words_BT, loss_of)
        everywhere()
        times |= measured({"everywhere": everywhere}, rounds, 3)
    return {**summary(times), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*SHAPES, EVERYWHERE])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trainers", action="store_true", help="only DeterministicTrainer")
    parser.add_argument("--out")
    chosen = parser.parse_args()
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    names = [chosen.only] if chosen.only else [*SHAPES, EVERYWHERE]
    for name in names:
        if name == EVERYWHERE:
            result[name] = compare_everywhere(Gpt().cuda(), 8, 1024, chosen.rounds)
            print(name, json.dumps(result[name], indent=1), flush=True)
            continue
        result[name] = {} if chosen.trainers else compare(name, chosen.rounds)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result[name]["trainer"] = compare_trainers(name, chosen.rounds)
        torch.cuda.empty_cache()
        print(name, json.dumps(result[name], indent=1), flush=True)
    if chosen.out:
        with open(chosen.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
