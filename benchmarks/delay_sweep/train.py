"""The training script of a delay sweep that was given none. One per rank.

An ordinary loop with a small GPT; every setting of the exchange comes from MEND_*. A step is made
as long as it is asked to be by sleeping before `optimizer.step()`: as with a GPU that computes, the
thread waits and the cores are free.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import mend
from mend.coordination.schedule import gap_steps
from mend.tools import demo_corpus
from mend.tools.demo_model import SIZES, ByteGPT, Windows, loss_of

LEARNING_RATE = 1e-3


def device_of_rank() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def steps_of(config: mend.MendConfig, warm_up: int, rounds: int) -> int:
    """Steps until `rounds` rounds were made after those that do not count."""
    counted = rounds * gap_steps(config.fragments, config.sync_period_steps)
    return max(warm_up, config.tau) + counted


def train(
    model: nn.Module, windows: Windows, device: torch.device, given: argparse.Namespace
) -> None:
    """Train all steps of this rank."""
    config = mend.MendConfig()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with mend.session(model, config, optimizer=optimizer) as runtime:
        for _ in range(steps_of(config, given.warm_up, given.rounds)):
            begun = time.perf_counter()
            batch = windows.next().to(device)
            loss = loss_of(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            runtime.count_tokens(batch[:, 1:].numel())
            time.sleep(max(0.0, given.step_ms / 1e3 - (time.perf_counter() - begun)))
            optimizer.step()
            runtime.record(loss=loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of `mend bench delay-sweep`.")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--step-ms", type=float, default=0.0, help="a step lasts at least this")
    parser.add_argument("--warm-up", type=int, default=1, help="steps that do not count")
    parser.add_argument("--rounds", type=int, default=6, help="rounds that count")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    given = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else no bits repeat on a GPU
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # racks share a machine, and a sum has one order
    torch.manual_seed(given.seed)
    rack, racks = int(os.environ["MEND_RACK"]), int(os.environ["MEND_RACKS"])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device, size = device_of_rank(), SIZES[given.size]
    model: nn.Module = ByteGPT(size).to(device)
    corpus = demo_corpus.standard_library(racks).racks[rack]
    windows = Windows(corpus, size, seed=1 + rack + racks * (rank + 1000 * given.seed))
    with contextlib.ExitStack() as cleanup:
        if ranks > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            cleanup.callback(dist.destroy_process_group)
            model = nn.parallel.DistributedDataParallel(model)
        train(model, windows, device, given)


if __name__ == "__main__":
    main()
