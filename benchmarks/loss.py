"""benchmarks.loss: the loss of a job that mend trains with its default settings.

Real racks train a byte-level GPT on the Python sources of the machine, each rack on packages of its
own, and the loss is that of packages on which no rack trains. Racks are processes under `mend
launch`; where there are fewer GPUs than racks they share them. Arms:

alone            rack 0 by itself, the steps of one rack
data-parallel    the gradients of all racks averaged in every step: equal tokens
mend             mend's default settings
mend:KEY=VALUE   mend with other settings, as in mend:sync_period_steps=16

--inner muon: the matrices of the blocks step by torch's Muon (Nesterov 0.95; steps of AdamW's
size, Liu et al. 2025, arXiv 2502.16982), the rest by AdamW, at one rate.

    python -m benchmarks.loss --racks 2 --arms alone,data-parallel,mend --seeds 0,1,2
    python -m benchmarks.loss --table

Each (arm, racks, seed) that is not yet in the file of results is one line more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mend
from benchmarks.quality_table import paired_pct, t_interval
from mend.tools.demo_corpus import Corpus, packages, split
from mend.tools.demo_model import ByteGPT, Size, learning_rate, loss_of

SIZES = {
    "tiny": Size(64, 2, 2, 64, 8),
    "5M": Size(256, 6, 4, 128, 8),
    "10M": Size(320, 8, 5, 256, 8),
    "125M": Size(1024, 10, 16, 256, 16),
}
HELD_OUT_WINDOWS, PEAK, WARM_SHARE = 512, 7e-4, 3
"""PEAK is the default of --peak, and the rate of rows that do not say theirs. After a third of the
steps data-parallel, `--start warm` goes on with mend."""
BETAS, DECAY = (0.9, 0.99), 0.1
STEP_MAX = 1.2 * (1 - BETAS[0]) / ((1 - BETAS[1]) * (1 - BETAS[0] ** 2 / BETAS[1])) ** 0.5
"""Most that a step of AdamW moves a weight, in learning rates (Cauchy-Schwarz over its averages of
the gradients), and a fifth more for the weight decay."""
MUON_MAX = 1.2 * 1.3 * 0.2
"""The same of Muon, relative to the root of a matrix's longer side: no element is greater than the
largest singular value, which five Newton-Schulz steps leave below 1.3 (Jordan 2024: .68 to 1.13,
and bfloat16 products)."""
SETTINGS = ("size", "racks", "steps", "start")
OLDER = {"peak": PEAK, "inner": "adamw"}
"""What rows were made with that do not say it."""
RESULTS = Path(__file__).parent / "results" / "loss.jsonl"


class Texts:
    """Windows of a text on the device; the same seed draws the same windows everywhere."""

    def __init__(self, text: bytes, size: Size, seed: int, device: torch.device) -> None:
        self._text_N = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        self._size, self._generator = size, torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> Tensor:
        """Return int64 of shape (count, context + 1)."""
        length = self._size.context + 1
        starts_B = torch.randint(len(self._text_N) - length, (count,), generator=self._generator)
        places = starts_B[:, None] + torch.arange(length)
        return self._text_N[places.to(self._text_N.device)].long()


class Rack:
    """One rack's model, optimizer and text."""

    def __init__(self, options: argparse.Namespace, seed: int, rack: int) -> None:
        self.size, self.options = SIZES[options.size], options
        self.device = _device(rack)
        corpus = texts(options.racks)
        torch.manual_seed(seed)
        self.model = ByteGPT(self.size).to(self.device)
        self.optimizers = inner_optimizers(self.model, options.inner, options.peak)
        self.windows = [
            Texts(text, self.size, 1000 * seed + number, self.device)
            for number, text in enumerate(corpus.racks)
        ]
        self.held_out = Texts(corpus.held_out, self.size, 1, self.device).draw(HELD_OUT_WINDOWS)

    def step(self, step: int, racks: Sequence[int]) -> None:
        """One step on the mean gradient of these racks' batches."""
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] = learning_rate(step, self.options.steps, self.options.peak)
        self.model.zero_grad()
        for rack in racks:
            loss = loss_of(self.model, self.windows[rack].draw(self.size.batch))
            (loss / len(racks)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the held-out loss in nats per byte."""
        return statistics.fmean(
            loss_of(self.model, part).item() for part in self.held_out.split(64)
        )

    def warm_up(self) -> int:
        """Train a third of the steps data-parallel, if the job begins warm; return their number."""
        warm = self.options.steps // WARM_SHARE if self.options.start == "warm" else 0
        for step in range(warm):
            self.step(step, range(self.options.racks))
        return warm


def inner_optimizers(model: nn.Module, inner: str, peak: float) -> list[torch.optim.Optimizer]:
    """Those that a rack steps with, `inner` being adamw or muon."""
    matrices = [
        value for name, value in model.named_parameters()
        if inner == "muon" and value.ndim == 2 and name.startswith("blocks.")
    ]  # fmt: skip
    others = [value for value in model.parameters() if all(value is not m for m in matrices)]
    steps: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=peak, betas=BETAS, weight_decay=DECAY)
    ]
    if matrices:
        steps.append(
            torch.optim.Muon(matrices, lr=peak, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
        )
    return steps


def _device(rack: int) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", rack % torch.cuda.device_count())
    return torch.device("cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def texts(racks: int) -> Corpus:
    """Packages of the standard library and of what is installed, split by rack."""
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib")}
    found = {
        name: text for folder in sorted(folders) for name, text in packages(Path(folder)).items()
    }
    return split(found, racks)


def train_one(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """Train without mend: `alone` or `data-parallel`."""
    rack = Rack(options, seed, 0)
    warm, began = rack.warm_up(), time.perf_counter()
    racks = [0] if arm == "alone" else range(options.racks)
    for step in range(warm, options.steps):
        rack.step(step, racks)
    loss = rack.loss()
    return {"loss": loss, "seconds": round(time.perf_counter() - began, 2)}


def train_rack(options: argparse.Namespace) -> None:
    """Be one rack of a job of mend; write its result."""
    number, seed = int(os.environ["MEND_RACK"]), options.seeds[0]
    rack = Rack(options, seed, number)
    warm = rack.warm_up()
    settings = json.loads(options.settings)
    config = mend.MendConfig(outer_start=options.start, **settings)
    before = [parameter.detach().clone() for parameter in rack.model.parameters()]
    with mend.session(rack.model, config, rack.optimizers) as runtime:
        began = time.perf_counter()
        for step in range(warm, options.steps):
            runtime.count_tokens(rack.size.batch * rack.size.context)
            rack.step(step, [number])
        trained = time.perf_counter() - began
    status = runtime.status()
    told = {
        "loss": rack.loss(), "seconds": round(trained, 2), "outcome": status.outcome,
        "bytes_sent": status.bytes_sent, "stall_ms": round(status.stall_ms_total),
        "beyond_reach": beyond_reach(rack, before, range(warm, options.steps), config),
    }  # fmt: skip
    Path(options.rank, f"{number}.json").write_text(json.dumps(told))


def step_max(inner: str, model: nn.Module) -> float:
    """Most that a step moves a weight, in learning rates."""
    if inner == "adamw":
        return STEP_MAX
    longest = max(max(value.shape) for value in model.parameters())
    return max(STEP_MAX, MUON_MAX * longest**0.5)


def beyond_reach(
    rack: Rack, before: Sequence[Tensor], steps: range, config: mend.MendConfig
) -> bool:
    """Whether a weight has moved further than these steps can move it, with all that the
    outer momentum adds. A merge that does so is wrong, whatever its loss."""
    most = step_max(rack.options.inner, rack.model) * sum(
        learning_rate(step, rack.options.steps, rack.options.peak) for step in steps
    )
    pairs = zip(rack.model.parameters(), before, strict=True)
    moved = max((now.detach() - old).abs().max().item() for now, old in pairs)
    return moved > config.outer_lr * most / (1 - config.outer_momentum)


def train_with_mend(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    settings = dict(part.split("=") for part in arm.split(":")[1:])
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            sys.executable, "-m", "mend.tools", "launch", "--racks", str(options.racks),
            "--no-witness", __file__, f"--rank={folder}", "--racks", str(options.racks),
            "--seeds", str(seed), "--steps", str(options.steps), "--size", options.size,
            "--start", options.start, "--peak", str(options.peak), "--inner", options.inner,
            "--settings", json.dumps(_typed(settings)),
        ]  # fmt: skip
        subprocess.run(argv, check=True, env=environment(options.racks), stdout=subprocess.DEVNULL)
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if {each["outcome"] for each in told} != {"merged"} or len(told) != options.racks:
        raise RuntimeError(f"{arm} with seed {seed} ended {told}")
    if any(each.pop("beyond_reach") for each in told):
        raise RuntimeError(
            f"{arm} with seed {seed} moved weights further than its steps can: {told}"
        )
    return told[0] | {"seconds": max(each["seconds"] for each in told)}


def environment(racks: int) -> dict[str, str]:
    """Return the environment of a job's launcher: its racks share the GPUs where there are
    fewer."""
    paths = [str(Path(__file__).parent.parent), *filter(None, sys.path)]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if count := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if visible[0] else [str(number) for number in range(count)]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(devices[rack % count] for rack in range(racks))
    return found


def _typed(settings: dict[str, str]) -> dict[str, Any]:
    """Numbers and booleans as in JSON, all else as text."""

    def typed(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {key: typed(value) for key, value in settings.items()}


def missing(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if (
        options.out.exists()) else []  # fmt: skip
    for seed in options.seeds:
        for arm in options.arms:
            key = {name: getattr(options, name) for name in (*SETTINGS, *OLDER)}
            key |= {"arm": arm, "seed": seed}
            if not any(key.items() <= (OLDER | row).items() for row in done):
                yield key


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Losses, and percent above data parallel at equal tokens and peak rate, paired by seed, with
    the 95 % t-interval of two seeds or more. Seeds: of the loss, and of the pairs if fewer."""
    names = (*SETTINGS, *OLDER, "arm", "loss", "above data parallel, % [95 % t-interval]", "seeds")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple((OLDER | row)[name] for name in (*SETTINGS, *OLDER, "arm"))
        groups.setdefault(key, []).append(row)
    for key in groups:
        own, base = (
            {row["seed"]: row["loss"] for row in groups.get((*key[:-1], arm), [])}
            for arm in (key[-1], "data-parallel")
        )
        above, said, seeds = paired_pct(own, base), "", str(len(own))
        if above and key[-1] != "data-parallel":
            found = t_interval(above)
            said = f"{found.mean:+.1f}"
            said += f" [{found.low:+.1f}, {found.high:+.1f}]" if found.n > 1 else ""
            seeds += f" ({found.n} paired)" if found.n < len(own) else ""
        mean = statistics.fmean(own.values())
        lines.append(f"| {' | '.join(map(str, key))} | {mean:.3f} | {said} | {seeds} |")
    return "\n".join(lines)


def of_page(peaks: Sequence[float]) -> str:
    """The table of the kept rows at these peak rates with AdamW inside, as quality.md has it."""
    rows = [OLDER | json.loads(line) for line in RESULTS.read_text().splitlines()]
    return table([row for row in rows if row["inner"] == "adamw" and row["peak"] in peaks])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--racks", type=int, default=2)
    parser.add_argument(
        "--arms", type=lambda text: text.split(","), default=["alone", "data-parallel", "mend"]
    )
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0])
    parser.add_argument("--steps", type=int, default=1536)
    parser.add_argument("--size", choices=SIZES, default="5M")
    parser.add_argument("--start", choices=("scratch", "warm"), default="scratch")
    parser.add_argument("--peak", type=float, default=PEAK, help="learning rate after the warm-up")
    parser.add_argument("--inner", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of --out")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train_rack(options)
        return
    if not options.table:
        for key in missing(options):
            run = train_with_mend if key["arm"].startswith("mend") else train_one
            row = key | run(options, key["arm"], key["seed"])
            row["device"] = device_name()
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    print(table([json.loads(line) for line in options.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
