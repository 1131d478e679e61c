"""Single operators at level shape on a GPU, beside torch's: their time, and whether a row's bits
change with the batch.

    python -m benchmarks.determinism_ops --out result.json
    python -m benchmarks.determinism_ops --table gemm norms attention

Data are random bf16. Every operator is captured in a CUDA graph, forward and with its gradients, so
that the host costs nothing. Blocks of torch and of level shape take turns, `--rounds` times; a
block is replays between two CUDA events, of `--block-ms` or one replay. "backward" is a call with
gradients less a call without. Figures are medians of the blocks, and of the ratios of blocks that
follow each other, with the least and the greatest ratio.

operators: 8 rows x 2,048 tokens x 4,096 features (attention: 32 heads of 128, causal; the features
of a token are neighbours, as linear layers leave them). The gradient of a weight is summed over
leaves of `--leaf-rows` rows. `of torch` is torch / level shape, so above 1 is faster. "alone" says
whether row 0 has the same bits alone as in the batch: the result and the gradient of the input.
gemm: forward with both gradients of the linear layers of Qwen 2.5, torch (cuBLAS) / level shape,
and the geometric mean over a model's.
norms: bytes per second of one call, of those of a copy of its input.
attention: forward and backward, time of level shape / cuDNN.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.determinism_gpu import captured
from mend.determinism import enable, rows
from mend.determinism.digests import same_bits

ROWS = 8
Operator = Callable[..., Tensor]
Shapes = tuple[tuple[int, ...], ...]
Replay = Callable[[], None]


def attend(*qkv: Tensor) -> Tensor:
    """(B, T, H, D) each, causal; keys and values may have fewer heads."""
    query, key, value = (each.transpose(1, 2) for each in qkv)
    fewer = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=fewer)
    return out.transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


OPERATORS: dict[str, tuple[Operator, Shapes]] = {
    "linear": (F.linear, ((ROWS, 2048, 4096), (4096, 4096))),
    "matmul": (torch.matmul, ((ROWS, 2048, 4096), (4096, 4096))),
    "attention": (attend, ((ROWS, 2048, 32, 128),) * 3),
    "rms_norm": (rms_norm, ((ROWS, 2048, 4096), (4096,))),
    "layer_norm": (layer_norm, ((ROWS, 2048, 4096), (4096,), (4096,))),
    "sum": (lambda x: x.sum(-1), ((ROWS, 2048, 4096),)),
    "mean": (lambda x: x.mean(-1), ((ROWS, 2048, 4096),)),
    "max": (lambda x: x.amax(-1), ((ROWS, 2048, 4096),)),
    "min": (lambda x: x.amin(-1), ((ROWS, 2048, 4096),)),
    "var": (lambda x: x.var(-1), ((ROWS, 2048, 4096),)),
    "std": (lambda x: x.std(-1), ((ROWS, 2048, 4096),)),
    "sigmoid": (torch.sigmoid, ((ROWS, 2048, 4096),)),
}

QWEN: dict[str, dict[str, tuple[int, int]]] = {
    "1.5B": {
        "q": (1536, 1536), "k, v": (256, 1536), "o": (1536, 1536), "gate, up": (8960, 1536),
        "down": (1536, 8960), "head": (151936, 1536),
    },
    "7B": {
        "q": (3584, 3584), "k, v": (512, 3584), "o": (3584, 3584), "gate, up": (18944, 3584),
        "down": (3584, 18944), "head": (152064, 3584),
    },
}  # fmt: skip
"""Outputs and inputs of a linear layer."""

CUTS = ((4, 4, 0.95), (1, 1, 0.85), (4, 1, 0.85))
"""Rows of 2,048 tokens in a microbatch, rows of a leaf, and the goal of the geometric mean: a
microbatch of 8,192 tokens that is one leaf, a smaller one that is, and one of four leaves."""

WIDTHS = (768, 1536, 3584, 4096)
FORWARD_MIN, BACKWARD_MIN, BACKWARD_MIN_NARROW = 0.84, 0.7, 0.63
"""Goals of the norms; the last one below 4,096 features."""

ATTENTIONS: dict[str, Shapes] = {
    "8 x 2,048, 32 heads of 128": ((8, 2048, 32, 128),) * 3,
    "2 x 8,192, 32 heads of 128": ((2, 8192, 32, 128),) * 3,
    "8 x 2,048, 28 heads of 128 and 4": ((8, 2048, 28, 128), *((8, 2048, 4, 128),) * 2),
    "8 x 2,048, 32 heads of 64": ((8, 2048, 32, 64),) * 3,
    "16 x 1,024, 12 heads of 64": ((16, 1024, 12, 64),) * 3,
}
"""Queries, keys, values."""

ATTENTION_MAX = 1.15


class Case:
    """Tensors of three dimensions or more are batches; others are weights."""

    def __init__(self, function: Operator, shapes: Shapes, device: str = "cuda") -> None:
        self.function = function
        generator = torch.Generator(device).manual_seed(1)
        self.given = [
            torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
            .mul_(1.0 if len(shape) > 2 else shape[-1] ** -0.5)
            .requires_grad_()
            for shape in shapes
        ]  # fmt: skip
        self.rows = shapes[0][0]
        self.grad = torch.randn_like(self.function(*self.given))

    def forward(self) -> None:
        with torch.no_grad():
            self.function(*self.given)

    def both(self) -> None:
        torch.autograd.grad(self.function(*self.given), self.given, self.grad)

    def is_alone_equal(self) -> bool:
        """Whether row 0 has equal bits alone and in the batch."""

        def results(count: int) -> list[Tensor]:
            given = [x[:count] if x.dim() > 2 else x for x in self.given]
            with rows(0, count):
                made = self.function(*given)
                return [made[:1], torch.autograd.grad(made, given[0], self.grad[:count])[0][:1]]

        return all(map(same_bits, results(1), results(self.rows)))

    def captured(self, pool: Any, leaf_rows: int | None = None) -> dict[str, Replay]:
        """At level shape, or torch's own where `leaf_rows` is None."""
        with nullcontext() if leaf_rows is None else level_shape(leaf_rows, self.rows):
            return {
                "forward": captured(self.forward, pool),
                "both": captured(self.both, pool),
            }


@contextmanager
def level_shape(leaf_rows: int, count: int) -> Iterator[None]:
    """For a batch of `count` rows."""
    with enable(7, level="shape", leaf_rows=leaf_rows), rows(0, count):
        yield


@dataclass(frozen=True)
class Blocks:
    """How operators are timed."""

    rounds: int
    block_ms: float

    def times(self, replays: dict[str, dict[str, Replay]]) -> dict[str, dict[str, list[float]]]:
        """Kind -> part -> ms of one call in every round; "backward" from "both"."""
        counts = {
            (kind, part): max(1, math.ceil(self.block_ms / milliseconds(replay, 3)))
            for kind, parts in replays.items()
            for part, replay in parts.items()
        }
        found: dict[str, dict[str, list[float]]] = {
            kind: {part: [] for part in parts} for kind, parts in replays.items()
        }
        for number in range(-1, self.rounds):
            for kind, parts in replays.items():
                for part, replay in parts.items():
                    taken = milliseconds(replay, counts[kind, part])
                    if number >= 0:
                        found[kind][part].append(taken)
        for taken_by in found.values():
            if "both" in taken_by:
                pairs = zip(taken_by["both"], taken_by["forward"], strict=True)
                taken_by["backward"] = [both - forward for both, forward in pairs]
        return found


def milliseconds(replay: Replay, count: int) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(count):
        replay()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / count


def middle(values: Sequence[float], digits: int = 3) -> float:
    return round(statistics.median(values), digits)


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Of blocks that follow each other."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": middle(ratios), "least_most": [round(min(ratios), 3), round(max(ratios), 3)]}


def shown(found: dict[str, Any]) -> str:
    least, most = found["least_most"]
    return f"**{found['median']:.2f}** ({least:.2f}, {most:.2f})"


def judged(value: float, goal: float, at_most: bool = False) -> str:
    met = value <= goal if at_most else value >= goal
    return f"{'<=' if at_most else '>='} {goal}: {'met' if met else 'missed'}"


def row(*cells: Any) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(*cells: str) -> None:
    print()
    row(*cells)
    print("|---" * len(cells) + "|", flush=True)


def operators(blocks: Blocks, leaf_rows: int, only: str | None) -> dict[str, Any]:
    words = {True: "yes", False: "no", None: "not asked"}
    result: dict[str, Any] = {}
    head("operator", "forward ms: torch / level shape", "of torch", "backward ms", "of torch",
         "alone = in a batch: torch", "level shape")  # fmt: skip
    for name in [only] if only else OPERATORS:
        case, pool = Case(*OPERATORS[name]), torch.cuda.graph_pool_handle()
        alone = {"torch": case.is_alone_equal()}
        if leaf_rows == 1:
            with enable(7, level="shape", leaf_rows=leaf_rows):
                alone["shape"] = case.is_alone_equal()
        times = blocks.times({
            "torch": case.captured(pool), "shape": case.captured(pool, leaf_rows)
        })  # fmt: skip
        found: dict[str, Any] = {"alone": alone}
        cells = [name]
        for part in ("forward", "backward"):
            own, other = times["shape"][part], times["torch"][part]
            found[part] = {
                "torch_ms": middle(other), "shape_ms": middle(own), "of_torch": ratio(other, own)
            }  # fmt: skip
            cells += [f"{middle(other)} / {middle(own)}", shown(found[part]["of_torch"])]
        row(*cells, *(words[alone.get(kind)] for kind in ("torch", "shape")))
        result[name] = found
        torch.cuda.empty_cache()
    return result


def gemm(blocks: Blocks) -> dict[str, Any]:
    result: dict[str, Any] = {}
    head("Qwen 2.5", "tokens, leaves", "linear", "outputs x inputs", "ms: torch / level shape",
         "of torch", "forward", "both gradients", "goal")  # fmt: skip
    for model, linears in QWEN.items():
        for count, leaf_rows, goal in CUTS:
            cut = f"{2048 * count:,}, {count // leaf_rows}"
            ratios = []
            for name, (outputs, inputs) in linears.items():
                case = Case(F.linear, ((count, 2048, inputs), (outputs, inputs)))
                pool = torch.cuda.graph_pool_handle()
                times = blocks.times({
                    "torch": case.captured(pool), "shape": case.captured(pool, leaf_rows)
                })  # fmt: skip
                own, other = times["shape"], times["torch"]
                found = {part: ratio(other[part], own[part]) for part in own}
                ratios.append(found["both"]["median"])
                row(model, cut, name, f"{outputs:,} x {inputs:,}",
                    f"{middle(other['both'])} / {middle(own['both'])}", shown(found["both"]),
                    *(f"{found[part]['median']:.2f}" for part in ("forward", "backward")),
                    "")  # fmt: skip
                result[f"{model}, {cut}, {name}"] = found
                del case
                torch.cuda.empty_cache()
            mean = statistics.geometric_mean(ratios)
            said = f"**{mean:.3f}** (least {min(ratios):.2f})"
            row(model, cut, "**geometric mean**", "", "", said, "", "", judged(mean, goal))
            result[f"{model}, {cut}"] = {"geometric_mean": round(mean, 3), "goal": goal}
    return result


def norms(blocks: Blocks) -> dict[str, Any]:
    result: dict[str, Any] = {}
    head("norm", "tokens x features", "copy, TB/s", "forward of copy: torch", "level shape", "goal",
         "backward of copy: torch", "level shape", "goal")  # fmt: skip
    for width in WIDTHS:
        tokens = 2048 * 4096 // width // 32 * 32
        for name, function, weights in (("rms", rms_norm, 1), ("layer", layer_norm, 2)):
            case = Case(function, ((ROWS, tokens, width), *((width,),) * weights))
            pool, x = torch.cuda.graph_pool_handle(), case.given[0].detach()
            out = torch.empty_like(x)
            times = blocks.times({
                "copy": {"once": captured(partial(out.copy_, x), pool)},
                "torch": case.captured(pool), "shape": case.captured(pool, 1),
            })  # fmt: skip
            copy = times["copy"]["once"]
            found: dict[str, Any] = {"copy_tb_s": middle([x.nbytes * 2e-9 / ms for ms in copy])}
            cells: list[str] = []
            # A copy moves the tensor twice; forward does too, backward reads two and writes one.
            narrow = BACKWARD_MIN_NARROW if width < 4096 else BACKWARD_MIN
            for part, moved, goal in (("forward", 1.0, FORWARD_MIN), ("backward", 1.5, narrow)):
                scaled = [moved * each for each in copy]
                for kind in ("torch", "shape"):
                    found[f"{part}_{kind}"] = ratio(scaled, times[kind][part])
                cells += [f"{found[f'{part}_torch']['median']:.2f}", shown(found[f"{part}_shape"])]
                cells += [judged(found[f"{part}_shape"]["median"], goal)]
            row(name, f"{ROWS * tokens:,} x {width:,}", found["copy_tb_s"], *cells)
            result[f"{name} {width}"] = found
            del case, x, out
            torch.cuda.empty_cache()
    return result


def attention(blocks: Blocks) -> dict[str, Any]:
    result: dict[str, Any] = {}
    head("attention, causal", "ms: cuDNN / level shape", "time of cuDNN's", "forward", "backward",
         "goal")  # fmt: skip
    for name, shapes in ATTENTIONS.items():
        case, pool = Case(attend, shapes), torch.cuda.graph_pool_handle()
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                theirs = case.captured(pool)
        except RuntimeError as refused:
            row(name, f"cuDNN: {str(refused).splitlines()[0]}", "", "", "", "")
            continue
        times = blocks.times({"cudnn": theirs, "shape": case.captured(pool, 1)})
        own, other = times["shape"], times["cudnn"]
        found = {part: ratio(own[part], other[part]) for part in own}
        row(name, f"{middle(other['both'])} / {middle(own['both'])}", shown(found["both"]),
            *(f"{found[part]['median']:.2f}" for part in ("forward", "backward")),
            judged(found["both"]["median"], ATTENTION_MAX, at_most=True))  # fmt: skip
        result[name] = found
        torch.cuda.empty_cache()
    return result


TABLES: dict[str, Callable[[Blocks], dict[str, Any]]] = {
    "gemm": gemm, "norms": norms, "attention": attention
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", nargs="+", choices=["operators", *TABLES], default=["operators"])
    parser.add_argument("--only", choices=list(OPERATORS), help="one of the operators")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-ms", type=float, default=15)
    parser.add_argument("--leaf-rows", type=int, default=1, help="of the operators")
    parser.add_argument("--out")
    chosen = parser.parse_args()
    blocks = Blocks(chosen.rounds, chosen.block_ms)
    of_operators = partial(operators, leaf_rows=chosen.leaf_rows, only=chosen.only)
    tables = {**TABLES, "operators": of_operators}
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{result['gpu']}, torch {result['torch']}")
    for name in chosen.table:
        result[name] = tables[name](blocks)
    if chosen.out:
        with open(chosen.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
