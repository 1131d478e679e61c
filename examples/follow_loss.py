"""Held-out loss of the merged model of examples/minimal.py, live, from outside the job.

    mend keys new run7.key
    export MEND_KEY_FILE=run7.key MEND_DIAGNOSTICS_DIR=runs/first
    mend launch --base-port 21900 examples/minimal.py --steps 100000
    python examples/follow_loss.py tcp://127.0.0.1:21900 --record runs/first
    mend report runs/first      # at any time: the losses are its curve "held_out_merged"

It ends with the job. `mend keys reader` makes a key for it that can only read.
"""

from __future__ import annotations

import argparse

import torch

import mend


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--wait-s", type=float, default=600.0)
    parser.add_argument("--record", help="the job's diagnostics_dir")
    arguments = parser.parse_args()

    chance = torch.Generator().manual_seed(1000)  # data that no rack trains on
    truth = torch.randn(32, 1, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(4096, 32, generator=chance)
    target = inputs @ truth + 0.5 * torch.randn(4096, 1, generator=chance)

    model = torch.nn.Linear(32, 1, bias=False)
    for version in mend.follow(arguments.address, every=0, wait_s=arguments.wait_s):
        version.fill(model)
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(inputs), target)
        if arguments.record:
            version.record(arguments.record, held_out_merged=loss.item())
        print(f"version={version.number} step={version.step} loss={loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
