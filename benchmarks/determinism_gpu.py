"""What the levels cost on a GPU: training steps of GPT-2 124M and of a Llama of 1.1B parameters
beside plain torch and torch.compile.

    python -m benchmarks.determinism_gpu --out result.json
    python -m benchmarks.determinism_gpu --only "8 x 1024" "everywhere" --out result.json

GPT's weights are fp32 and its layers compute in bf16 (autocast); Llama's weights are bf16. AdamW is
fused. A step is forward, backward and optimizer. "device": replays of a CUDA graph, in which the
host costs nothing; "eager": wall time of calls; "trainer": wall time of DeterministicTrainer.step
beside a plain step, with and without its setting `cuda_graph`; "everywhere": the same of level
everywhere and a plain step, both in fp32 (GPT-2, 8 rows). The variants take turns, and medians with
quartiles over the rounds are given. All variants train one set of weights. "run" and "run compiled"
are at level run; "run compiled" keeps its embeddings out of torch.compile (see `Lookup`).

The file is written and a table printed after each row, so that a run that is cut keeps its rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import torch
from torch import Tensor, nn

from benchmarks._determinism_models import Gpt, Llama, loss_in_bf16, loss_of
from mend.determinism import DeterministicTrainer, enable, rows
from mend.errors import NotDeterministic


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its batch: (rows, tokens + 1) words, `leaf_rows` rows in a leaf."""

    make: Callable[..., nn.Module]
    dtype: torch.dtype
    rows: int
    tokens: int
    leaf_rows: int
    vocabulary: int
    goals: dict[str, float] = field(default_factory=dict)
    """Variant -> most that its device time may be of the compiled plain step's."""
    is_short: bool = False
    """Only what depends on the leaves: level shape beside plain and compiled."""

    @property
    def leaves(self) -> int:
        return self.rows // self.leaf_rows

    @property
    def loss(self) -> Callable[[nn.Module, Tensor], Tensor]:
        return loss_in_bf16 if self.dtype == torch.float32 else loss_of

    def model(self, make: Callable[..., nn.Module] | None = None) -> nn.Module:
        torch.manual_seed(0)
        with torch.device("cuda"):
            return (make or self.make)().to(self.dtype)

    def words(self) -> Tensor:
        return torch.randint(0, self.vocabulary, (self.rows, self.tokens + 1), device="cuda")


_GPT = partial(Shape, Gpt, torch.float32, vocabulary=50257, goals={"shape": 1.10})
_LLAMA = partial(Shape, Llama, torch.bfloat16, vocabulary=32768)
_TWO_LEAVES = {"shape": 1.05}
SHAPES = {
    "GPT-2 124M, 8 x 1024": _GPT(8, 1024, 1),
    "GPT-2 124M, 16 x 1024": _GPT(16, 1024, 2),
    "Llama 1.1B, 4 x 2048": _LLAMA(4, 2048, 2, goals=_TWO_LEAVES),
    "Llama 1.1B, 8 x 2048": _LLAMA(8, 2048, 4, goals=_TWO_LEAVES),
    "Llama 1.1B, 8 x 1024, 8 leaves": _LLAMA(8, 1024, 1, is_short=True),
    "Llama 1.1B, 8 x 2048, 8 leaves": _LLAMA(8, 2048, 1, is_short=True),
}
"""8,192 and 16,384 tokens of each model. Rows with eight leaves of Llama have no goal."""
RUN_GOAL = 1.05
"""Of level run: of the same step, plain or compiled, without the level."""
EVERYWHERE = "GPT-2 124M, 8 x 1024, everywhere"
PARTS = ("steps", "trainer")

Step = Callable[[], Any]
Times = dict[str, list[float]]


class Lookup(nn.Embedding):
    """An embedding that torch.compile leaves out.

    Where torch asks for deterministic algorithms, inductor computes the gradient of an embedding by
    aten.index_put_, which waits for the GPU to check the range of its indices (torch 2.11): no CUDA
    graph can hold it. Outside of compiled code aten's own gradient is used, which a graph can hold.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def sharing(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """make(), with the parameters of `model`."""
    with torch.device("meta"):
        other = make()
    mine = dict(model.named_parameters(remove_duplicate=False))
    for name, _ in list(other.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        setattr(other.get_submodule(owner), last, mine[name])
    return other


def outside_compile(model: nn.Module) -> nn.Module:
    """`model`, whose embeddings are left out by torch.compile."""
    for each in model.modules():
        if type(each) is nn.Embedding:
            each.__class__ = Lookup
    return model


def made_for_shape(make: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    """What level shape trains in place of it: Llama with @elementwise functions."""
    return partial(Llama, fused=True) if make is Llama else make


def step_of(
    model: Callable[..., Tensor], loss: Any, optimizer: torch.optim.Optimizer, words_BT: Tensor
) -> Step:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model, words_BT).backward()
        optimizer.step()

    return step


def variants(shape: Shape, model: nn.Module, words_BT: Tensor) -> dict[str, Step]:
    """A step of each variant, all of which train the weights of `model`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=True)
    called: dict[str, Callable[..., Tensor]] = {
        "plain": model,
        "compiled": torch.compile(model, dynamic=False),
        "shape": sharing(model, made_for_shape(shape.make)),
    }
    if not shape.is_short:
        apart = outside_compile(sharing(model, shape.make))
        called |= {"run": model, "run compiled": torch.compile(apart, dynamic=False)}
    return {name: step_of(each, shape.loss, optimizer, words_BT) for name, each in called.items()}


def captured(step: Step, pool: Any) -> Step:
    """`pool`: the graphs' memory. They run one after another, so they share it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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


def measured(
    steps: dict[str, Step], rounds: int, count: int, timed: Callable[..., float] = milliseconds
) -> Times:
    """Times of a step in ms. The steps take turns; those at level run are made under it."""
    times: Times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            with level_of(name):
                times[name].append(timed(step, count))
    return times


def level_of(name: str) -> Any:
    return enable(7, level="run") if name.startswith("run") else nullcontext()


def summary(times: Times) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, taken in times.items():
        found[name] = {
            "ms": round(statistics.median(taken), 2),
            "ms_quartiles": [round(each, 2) for each in statistics.quantiles(taken)[::2]],
        }
        for base in ("plain", "compiled"):
            if base in times:
                pairs = zip(taken, times[base], strict=True)
                ratio = statistics.median(one / other for one, other in pairs)
                found[name][f"of_{base}"] = round(ratio, 3)
    return found


def compare(shape: Shape, rounds: int) -> dict[str, Any]:
    """Level run's graphs come last: if torch cannot capture one, all else is measured already."""
    words_BT = shape.words()
    steps = variants(shape, shape.model(), words_BT)
    found: dict[str, Any] = {"leaves": shape.leaves}
    at_shape = {"shape": steps.pop("shape")}
    for name, step in list(steps.items()):
        if why := obstacle(name, partial(warm_up, step)):
            found[f"{name}: failed"] = why
            del steps[name]
    wall = measured(steps, rounds, 2)
    pool = torch.cuda.graph_pool_handle()
    graphs = {name: captured(steps[name], pool) for name in ("plain", "compiled")}
    with enable(7, level="shape", leaf_rows=shape.leaf_rows), rows(0, shape.rows):
        warm_up(at_shape["shape"])
        wall |= measured(at_shape, rounds, 2)
        graphs |= {"shape": captured(at_shape["shape"], pool)}
        device = measured(graphs, rounds, 3)
    found |= {"device": summary(device), "eager": summary(wall)}
    found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return found | graphs_of_run(graphs, steps, pool, rounds)


def warm_up(step: Step) -> None:
    for _ in range(3):
        step()


def obstacle(name: str, function: Callable[[], Any]) -> str | None:
    """Why `function` failed; raises where it is not of level run."""
    try:
        with level_of(name):
            function()
            return None
    except RuntimeError as fault:
        if not name.startswith("run"):
            raise
        return str(fault).splitlines()[0]


def graphs_of_run(
    graphs: dict[str, Step], steps: dict[str, Step], pool: Any, rounds: int
) -> dict[str, Any]:
    """Device times of level run, each beside the same step without it, or why it has none. After a
    capture that failed the pool may be unusable, so that no other follows."""
    found: dict[str, Any] = {}
    for name, base in (("run", "plain"), ("run compiled", "compiled")):
        if name in steps:
            pair = {base: graphs[base]}

            def capture(step: Step = steps[name], pair: dict[str, Step] = pair) -> None:
                pair["run"] = captured(step, pool)

            if why := obstacle(name, capture):
                found[f"{name}: no graph"] = why
                break
            times = measured(pair, rounds, 3)
            found[f"device, {name}"] = summary({base: times[base], name: times["run"]})
    return found


def compare_trainers(shape: Shape, rounds: int) -> dict[str, Any]:
    words_BT = shape.words()
    model = shape.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=True)
    steps = {"plain": step_of(model, shape.loss, optimizer, words_BT)}
    warm_up(steps["plain"])
    plain = measured(steps, rounds, 3)  # before torch's kernels are replaced
    with enable(7, level="shape", leaf_rows=shape.leaf_rows):
        for kind in ("eager", "cuda_graph"):
            model = shape.model(made_for_shape(shape.make))
            trainer = DeterministicTrainer(
                model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), 7,
                level="shape", cuda_graph=kind == "cuda_graph",
            )  # fmt: skip
            steps[kind] = partial(trainer.step, words_BT, shape.loss)
            for _ in range(4):
                steps[kind]()
        if trainer._graphs is None or trainer._graphs.why_not:
            raise RuntimeError(f"no step was replayed: {trainer._graphs}")
        del steps["plain"]
        times = {**plain, **measured(steps, rounds, 3)}
    return {**summary(times), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)}


def compare_everywhere(rounds: int) -> dict[str, Any]:
    model = Gpt().cuda()
    words_BT = torch.randint(0, 50257, (8, 1024 + 1), device="cuda")
    plain = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = step_of(model, loss_of, plain, words_BT)
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


def table(name: str, row: dict[str, Any]) -> str:
    """The row in Markdown, as results/determinism_gpu.md has it, with its goals."""
    lines = [f"{name}, leaves: {row['leaves']}" if "leaves" in row else name, ""]
    lines += ["| | ms, median | quartiles | of plain | of compiled | goal |", "|---" * 6 + "|"]
    groups = {"trainer": row} if "plain" in row else row  # level everywhere has one group
    for kind, group in groups.items():
        for variant, found in group.items() if isinstance(group, dict) else ():
            if isinstance(found, dict):
                low, high = found["ms_quartiles"]
                cells = [f"{kind}: {variant}", found["ms"], f"{low}, {high}"]
                cells += [found.get("of_plain", ""), found.get("of_compiled", "")]
                cells.append(judged(name, kind, variant, found))
                lines.append("| " + " | ".join(str(each) for each in cells) + " |")
    lines += [f"{key}: {text}" for key, text in row.items() if isinstance(text, str)]
    return "\n".join([*lines, ""])


def judged(name: str, kind: str, variant: str, found: dict[str, Any]) -> str:
    """The goal of this figure, and whether it is met; empty: it has none."""
    if variant == "run":
        return verdict(found, RUN_GOAL, "plain")
    if variant == "run compiled":
        return verdict(found, RUN_GOAL, "compiled")
    goal = SHAPES[name].goals.get(variant) if kind == "device" and name in SHAPES else None
    return "" if goal is None else verdict(found, goal, "compiled")


def verdict(found: dict[str, Any], goal: float, base: str) -> str:
    met = "met" if found[f"of_{base}"] <= goal else "missed"
    return f"<= {goal:.2f} of {base}: {met}"


def chosen_rows(wanted: Sequence[str]) -> list[str]:
    """The rows whose names contain one of `wanted`; a whole name means that row alone."""
    names = [*SHAPES, EVERYWHERE]
    found: set[str] = set()
    for part in wanted or [""]:
        fitting = {part} if part in names else {name for name in names if part in name}
        if not fitting:
            raise SystemExit(f"--only {part!r}: the rows are {'; '.join(names)}")
        found |= fitting
    return [name for name in names if name in found]


def measure_row(name: str, rounds: int, parts: Sequence[str]) -> dict[str, Any]:
    if name == EVERYWHERE:
        return compare_everywhere(rounds)
    shape = SHAPES[name]
    row = compare(shape, rounds) if "steps" in parts else {}
    if "trainer" in parts and not shape.is_short:
        free_memory()
        row["trainer"] = compare_trainers(shape, rounds)
    return row


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measure_all(
    names: Sequence[str],
    measure: Callable[[str], dict[str, Any]],
    result: dict[str, Any],
    out: Path | None,
) -> bool:
    """Measure row after row; print each, and write all so far to `out`. A row that fails, as for
    lack of memory, is noted and does not stop the others. Returns whether all succeeded."""
    succeeded = True
    for name in names:
        try:
            row = measure(name)
        except (RuntimeError, NotDeterministic) as fault:
            row = {"failed": str(fault).splitlines()[0]}
            succeeded = False
        result[name] = row
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({name: row}), f"\n{table(name, row)}", flush=True)
    return succeeded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME_PART", help="rows, by name")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of each row")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--out", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    names = chosen_rows(chosen.only)
    if chosen.list:
        print("\n".join(names))
        return
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }

    def measure(name: str) -> dict[str, Any]:
        torch.compiler.reset()  # of one function torch compiles but a few shapes
        free_memory()
        return measure_row(name, chosen.rounds, chosen.parts)

    if not measure_all(names, measure, result, chosen.out):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
