"""benchmarks.long_run: minutes of training over a poor link. Does anything grow, and do the racks
agree to the end? Started on every rank; prints JSON lines.

    mend launch --no-witness --racks 2 --link 1gbit,20ms benchmarks/long_run.py --minutes 15

A model of the Qwen 2.5 shape with random weights (bf16, fused AdamW) trains on random tokens, other
ones on each rack, with mend's default settings and --codec. Every --every-s seconds a rank prints
its tokens/s since the last line, its stall and bytes sent, and the memory that it holds: of the GPU
allocated and reserved, of the host resident and page-locked. The last line has the outcome and the
digest of the merged model, which is the same on all racks if their merges were.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if not __package__:  # started by its path: the folder that holds `benchmarks` is not searched
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# After the lines above, which they need.
import torch
from torch import nn

import mend
from benchmarks import qwen
from benchmarks.delay_sweep.train import device_of_rank

PAGE = os.sysconf("SC_PAGE_SIZE")
ROWS = 64
"""Rows of tokens that a rank draws from, so that drawing costs nothing."""


def held(device: torch.device) -> dict[str, float]:
    """Return GB held now."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    found = {"host": resident}
    if device.type == "cuda":
        found |= {
            "pinned": torch.cuda.host_memory_stats().get("allocated_bytes.current", 0),
            "gpu_allocated": torch.cuda.memory_allocated(),
            "gpu_reserved": torch.cuda.memory_reserved(),
        }
    return {f"{name}_gb": round(count / 1e9, 3) for name, count in found.items()}


class Run:
    """One rank: what it trains and prints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rack = options, int(os.environ["MEND_RACK"])
        self.device = device_of_rank()
        shape = qwen.SHAPES[options.shape]
        self.model: nn.Module = qwen.build(shape, options.positions, self.device, 0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        random = torch.Generator().manual_seed(1 + self.rack)
        size = (ROWS * options.sequences, options.positions + 1)
        self.tokens_NT = torch.randint(shape.vocab, size, generator=random).to(self.device)

    def train(self) -> None:
        options = self.options
        config = mend.MendConfig(codec=options.codec, witness_addr="", start_timeout_s=300.0)
        with mend.session(self.model, config, self.optimizer) as runtime:
            began = marked = time.monotonic()
            step = tokens = 0
            while time.monotonic() - began < 60 * options.minutes:
                tokens += self._step(step, runtime)
                step += 1
                now = time.monotonic()
                if now - marked >= options.every_s:
                    if self.device.type == "cuda":
                        torch.cuda.synchronize()
                    rate = round(tokens / (now - marked))
                    self._say(now - began, step, runtime, tokens_per_s=rate)
                    marked, tokens = time.monotonic(), 0
            trained_s = time.monotonic() - began
        status = runtime.status()
        end_s = round(time.monotonic() - began - trained_s, 1)
        self._say(
            trained_s, step, runtime, end_s=end_s, outcome=status.outcome,
            digest=status.anchor_digest, versions=list(status.versions),
        )  # fmt: skip

    def _step(self, step: int, runtime: Any) -> int:
        count = self.options.sequences
        tokens_BT = self.tokens_NT[step % ROWS * count :][:count]
        runtime.count_tokens(tokens_BT[:, 1:].numel())
        self.model(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return tokens_BT[:, 1:].numel()

    def _say(self, seconds: float, step: int, runtime: Any, **more: Any) -> None:
        status = runtime.status()
        line = {
            "rack": self.rack, "s": round(seconds, 1), "step": step,
            "stall_ms": round(status.stall_ms_total), "bytes_sent": status.bytes_sent,
            "missed": status.rounds_missed, **held(self.device), **more,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--every-s", type=float, default=30.0)
    parser.add_argument("--shape", choices=sorted(qwen.SHAPES), default="1.5b")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--codec", default="int8")
    Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()
