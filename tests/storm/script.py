"""The training script of the storms: mend's public API only, and a diary of its own.

`python -m tests.storm.script '{"out": ..., "stop": ..., "config": {...}}'`. One JSON line for every
step, flushed before the next one, so that what a killed rack did is known up to its last step. The
judge reads these lines and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.process import train
from tests.process.twin import digest

LOOK_STEPS = 12
"""Every so many steps the merged weights themselves are looked at, not only mend's digest."""


class Diary:
    """Lines of one life of one rank, each whole on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **said: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **said}) + "\n")
        self._file.flush()


def hash_of(model: nn.Module) -> str:
    """Over the bits of every parameter, by name."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        found.update(name.encode())
        found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def seen(status: Any) -> dict[str, Any]:
    """What mend says of itself, to be compared with what the script has counted."""
    ledger = status.ledger
    return {
        "versions": list(status.versions),
        "digest": status.anchor_digest,
        "told_step": status.step,
        "told_tokens": status.tokens,
        "ledger": [ledger.merged, ledger.open, ledger.discarded],
    }


def run(told: dict[str, Any], diary: Diary) -> None:
    import mend

    rack, rank = int(os.environ["MEND_RACK"]), int(os.environ.get("RANK", "0"))
    model = train.build("plain", rack)
    wrapped: nn.Module = model
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
        wrapped = train.spread(model, "ddp")
    optimizer = train.optimizer_of(model)
    stop, pace_s = Path(told["stop"]), told["pace_ms"] / 1000
    tokens = 0
    with mend.session(wrapped, mend.MendConfig(**told["config"]), optimizer) as runtime:
        step = runtime.status().step  # of a rack that joins: its donor's
        begun = digest(optimizer.state_dict())
        diary.write("start", step=step, tokens=0, state=begun, **seen(runtime.status()))
        while not stopped(stop):
            step += 1
            loss = train.loss_of(wrapped, rack, rank, step)
            optimizer.zero_grad()
            loss.backward()
            tokens += train.tokens_of(rack, step)
            runtime.count_tokens(train.tokens_of(rack, step))
            optimizer.step()
            look = {}
            if step % LOOK_STEPS == 0:
                with runtime.anchor_weights():
                    look = {"weights": hash_of(model)}
            look["state"] = digest(optimizer.state_dict())
            diary.write("step", step=step, tokens=tokens, **seen(runtime.status()), **look)
            time.sleep(pace_s)
    end = seen(runtime.status())
    diary.write("end", step=step, tokens=tokens, **end, weights=hash_of(model))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def stopped(stop: Path) -> bool:
    """Whether the harness has said that training is over: all ranks of a rack hear it together."""
    there = stop.exists()
    if not torch.distributed.is_initialized():
        return there
    flag = torch.tensor([int(there)])
    torch.distributed.all_reduce(flag)
    return bool(flag.item())


def main() -> None:
    torch.set_num_threads(1)
    told = json.loads(sys.argv[1])
    diary = Diary(Path(told["out"].format(rank=os.environ.get("RANK", "0"))))
    try:
        run(told, diary)
    except BaseException as error:
        diary.write("error", name=type(error).__name__, text=str(error))
        raise


if __name__ == "__main__":
    main()
