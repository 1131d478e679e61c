"""What a comparing run of `mend repro` costs: a training script run plain and by `mend repro`.

    python -m benchmarks.repro_cost --out result.json

The script trains GPT-2 124M (16 x 1,024 random words, weights fp32, autocast to bf16, fused AdamW)
under torch's deterministic algorithms, reads its loss in every step, and knows nothing of mend.
`--pairs` times it runs plain, and then by `mend repro`, which runs it twice and must find it equal.
"step": the medians of the steps of each run but the first three, in ms. "script": wall time of the
process in s, of `mend repro` by two. Ratios are those of runs that follow each other. `--tiny`: a
small model, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMES = "REPRO_COST_TIMES"
"""Names the file to which a run of the script adds the times of its steps, as one line."""

WARM = 3
GOAL = 3.0


def train(steps: int, is_tiny: bool) -> list[float]:
    """Returns ms per step."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from benchmarks._determinism_models import Gpt, loss_in_bf16

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words, rows, tokens = (64, 2, 16) if is_tiny else (50304, 16, 1024)
    with device:
        model = Gpt(words, 32, 1, 2, tokens) if is_tiny else Gpt(words)
        batches = torch.randint(0, words, (steps, rows, tokens + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    taken = []
    for batch in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_in_bf16(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


def script(options: Sequence[str]) -> list[str]:
    return ["-m", "benchmarks.repro_cost", "--train", *options]


def run(command: Sequence[str], times: Path) -> tuple[float, list[float]]:
    """Wall seconds, and of every run of the script the median of its steps."""
    times.write_text("")
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], env={**os.environ, TIMES: str(times)}, check=True)
    seconds = time.perf_counter() - start
    runs = [json.loads(line) for line in times.read_text().splitlines()]
    return seconds, [statistics.median(each[WARM:]) for each in runs]


def measure(pairs: int, options: Sequence[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {
        name: [] for name in ("plain_ms", "comparing_ms", "plain_s", "comparing_s")
    }
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        for _ in range(pairs):
            seconds, steps = run(script(options), times)
            found["plain_s"].append(round(seconds, 1))
            found["plain_ms"] += steps
            seconds, steps = run(["-m", "mend", "repro", "--", *script(options)], times)
            found["comparing_s"].append(round(seconds / 2, 1))
            found["comparing_ms"].append(statistics.mean(steps))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train:
        taken = train(chosen.steps, chosen.tiny)
        with open(os.environ[TIMES], "a") as file:
            file.write(json.dumps(taken) + "\n")
        return
    options = ["--steps", str(chosen.steps), *(["--tiny"] if chosen.tiny else [])]
    found: dict[str, Any] = dict(measure(chosen.pairs, options))
    print("\n| | plain | comparing | ratio, median (least, most) | goal |\n|---|---|---|---|---|")
    for name, unit in (("step", "ms"), ("script", "s")):
        plain, comparing = found[f"plain_{unit}"], found[f"comparing_{unit}"]
        ratios = [ours / theirs for ours, theirs in zip(comparing, plain, strict=True)]
        middle = found[name] = round(statistics.median(ratios), 2)
        cells = [f"{statistics.median(each):.1f} {unit}" for each in (plain, comparing)]
        spread = f"**{middle}** ({min(ratios):.2f}, {max(ratios):.2f})"
        print(f"| {name} | {' | '.join(cells)} | {spread} | "
              f"<= {GOAL:g}: {'met' if middle <= GOAL else 'missed'} |")  # fmt: skip
    if chosen.out:
        Path(chosen.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
