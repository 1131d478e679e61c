"""Single operators at level shape on a GPU, beside torch's: their time, and whether a row's bits
change with the batch.

    python -m benchmarks.determinism_ops --out result.json

Inputs are bf16 of 8 rows x 2,048 tokens x 4,096 features (attention: 32 heads of 128, causal; the
features of a token are neighbours, as linear layers leave them). The gradient of a weight is summed
over leaves of `--leaf-rows` rows. Every operator is captured in a CUDA graph, forward and with its
gradients, so that the host costs nothing. `--rounds` blocks of torch and of level shape take turns;
a block is `--count` replays between two CUDA events. Times are medians of the blocks in ms,
`of_torch` is the median of (torch / level shape) over pairs of blocks, so above 1 is faster than
torch. "backward" is a call with gradients less a call without. "alone" says whether row 0 has the
same bits alone as in the batch: the result and the gradient of the input.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.determinism_gpu import captured
from mend.determinism import enable, rows
from mend.determinism.digests import same_bits

ROWS = 8
Operator = Callable[..., Tensor]

OPERATORS: dict[str, tuple[Operator, tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((ROWS, 2048, 4096), (4096, 4096))),
    "matmul": (torch.matmul, ((ROWS, 2048, 4096), (4096, 4096))),
    "attention": (
        lambda *qkv: F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in qkv), is_causal=True
        ).transpose(1, 2),
        ((ROWS, 2048, 32, 128),) * 3,
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4096,), w, 1e-5), ((ROWS, 2048, 4096), (4096,))),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (4096,), w, b), ((ROWS, 2048, 4096), (4096,), (4096,))
    ),
    "sum": (lambda x: x.sum(-1), ((ROWS, 2048, 4096),)),
    "mean": (lambda x: x.mean(-1), ((ROWS, 2048, 4096),)),
    "max": (lambda x: x.amax(-1), ((ROWS, 2048, 4096),)),
    "min": (lambda x: x.amin(-1), ((ROWS, 2048, 4096),)),
    "var": (lambda x: x.var(-1), ((ROWS, 2048, 4096),)),
    "sigmoid": (torch.sigmoid, ((ROWS, 2048, 4096),)),
}  # fmt: skip


class Case:
    def __init__(self, name: str, device: str) -> None:
        self.function, shapes = OPERATORS[name]
        generator = torch.Generator(device).manual_seed(1)
        self.given = [
            torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
            .mul_(shape[-1] ** -0.5 if shape[0] != ROWS else 1.0)
            .requires_grad_()
            for shape in shapes
        ]  # fmt: skip
        self.grad = torch.randn_like(self.function(*self.given))

    def forward(self) -> None:
        with torch.no_grad():
            self.function(*self.given)

    def both(self) -> None:
        torch.autograd.grad(self.function(*self.given), self.given, self.grad)

    def is_alone_equal(self) -> bool:
        """Whether row 0 has equal bits alone and in the batch."""

        def results(count: int) -> list[Tensor]:
            given = [x[:count] if x.shape[0] == ROWS else x for x in self.given]
            with rows(0, count):
                made = self.function(*given)
                return [made[:1], torch.autograd.grad(made, given[0], self.grad[:count])[0][:1]]

        return all(map(same_bits, results(1), results(ROWS)))


def milliseconds(replay: Callable[[], None], count: int) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(count):
        replay()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / count


def compare(case: Case, leaf_rows: int, rounds: int, count: int) -> dict[str, Any]:
    pool = torch.cuda.graph_pool_handle()
    alone = {"torch": case.is_alone_equal()}
    replays = {"torch": [captured(step, pool) for step in (case.forward, case.both)]}
    with enable(7, level="shape", leaf_rows=leaf_rows), rows(0, ROWS):
        if leaf_rows == 1:
            alone["shape"] = case.is_alone_equal()
        replays["shape"] = [captured(step, pool) for step in (case.forward, case.both)]
    times: dict[str, dict[str, list[float]]] = {
        kind: {"forward": [], "backward": []} for kind in replays
    }
    for number in range(-1, rounds):
        for kind, (forward, both) in replays.items():
            forward_ms, both_ms = milliseconds(forward, count), milliseconds(both, count)
            if number >= 0:
                times[kind]["forward"].append(forward_ms)
                times[kind]["backward"].append(both_ms - forward_ms)
    found: dict[str, Any] = {"alone": alone}
    for part in ("forward", "backward"):
        own, other = times["shape"][part], times["torch"][part]
        ratios = [a / b for a, b in zip(other, own, strict=True)]
        found[part] = {
            "torch_ms": round(statistics.median(other), 3),
            "shape_ms": round(statistics.median(own), 3),
            "of_torch": round(statistics.median(ratios), 2),
            "least_most": [round(min(ratios), 2), round(max(ratios), 2)],
        }
    return found


def line(name: str, found: dict[str, Any]) -> str:
    cells = [name]
    for part in ("forward", "backward"):
        each = found[part]
        least, most = each["least_most"]
        cells += [f"{each['torch_ms']} / {each['shape_ms']}"]
        cells += [f"**{each['of_torch']}** ({least}, {most})"]
    words = {True: "yes", False: "no", None: "not asked"}
    cells += [words[found["alone"].get(kind)] for kind in ("torch", "shape")]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(OPERATORS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--leaf-rows", type=int, default=1)
    parser.add_argument("--out")
    chosen = parser.parse_args()
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{result['gpu']}, torch {result['torch']}\n")
    print("| operator | forward ms: torch / level shape | of torch | backward ms | of torch "
          "| alone = in a batch: torch | level shape |")  # fmt: skip
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in [chosen.only] if chosen.only else OPERATORS:
        result[name] = compare(Case(name, "cuda"), chosen.leaf_rows, chosen.rounds, chosen.count)
        print(line(name, result[name]), flush=True)
        torch.cuda.empty_cache()
    if chosen.out:
        with open(chosen.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
