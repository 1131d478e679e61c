"""A training script whose rows come from a DataLedger, for test_data_ledger.py.

Each rank writes a line per step, flushed: its step and the rows that it trained. So the test knows
what a rack did that was killed.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import mend
from tests.process import train
from tests.process.injected import await_file


@dataclass(frozen=True)
class Options:
    out: str
    lines: str
    """Where the steps are written, with `{rank}` in it."""
    rows: int
    batch: int = 4
    seed: int = 5
    epochs: int = 0
    """Passes whose orders mend draws; 0: one, in an order that the script gives."""
    config: dict[str, Any] = field(default_factory=dict)
    pace_ms: float = 0.0
    holds: dict[str, str] = field(default_factory=dict)
    """step -> the step after it begins once this file is there; 0: the loop begins then."""
    cut: int = 0
    """A checkpoint after this step, in the folder `cuts`; the script ends there."""
    cuts: str = ""
    resume: str = ""
    drop_last: bool = False
    uncounted: bool = False
    optimizers: str = "given"
    """found: mend_init is given none; two: the first of two given ones steps last."""
    unequal: bool = False
    stop: int = 1 << 40
    """The loop ends after this step."""


def optimizers_of(options: Options, model: torch.nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """(those that mend_init is given, a call that makes a step)."""
    if options.optimizers != "two":
        return (optimizer if options.optimizers == "given" else None), optimizer.step
    first, *others = model.parameters()
    two = [torch.optim.SGD(each, lr=0.05) for each in ([first], others)]
    return two, lambda: [each.step() for each in reversed(two)]


def run(options: Options, result: dict[str, Any]) -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model: torch.nn.Module = train.build("plain", 0)
    wrapped = model
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        wrapped = train.spread(model, "ddp", "cpu")
    optimizer = train.optimizer_of(model)
    given, make_step = optimizers_of(options, model, optimizer)
    if options.resume:
        found = mend.newest_checkpoint(options.resume)
        assert found is not None
        train.load(Path(found) / f"rack-{os.environ['MEND_RACK']}", model, optimizer)
    data = torch.randn(options.rows, train.INPUTS, generator=torch.Generator().manual_seed(1))
    rows = torch.utils.data.TensorDataset(torch.arange(options.rows), data)
    if options.epochs:
        ledger = mend.DataLedger(options.rows, epochs=options.epochs, seed=options.seed)
    else:
        chance = torch.Generator().manual_seed(options.seed)
        ledger = mend.DataLedger(torch.randperm(options.rows, generator=chance))
    config = mend.MendConfig(**options.config)
    resume = options.resume or None
    with (
        Path(options.lines.format(rank=rank)).open("w") as lines,
        mend.session(wrapped, config, given, ledger=ledger, resume=resume) as runtime,
    ):
        if "0" in options.holds:
            await_file(options.holds["0"])
        loader = DataLoader(rows, options.batch, sampler=ledger, drop_last=options.drop_last)
        result["begins"] = ledger.epoch
        for numbers, batch in (each for _ in range(ledger.epoch, ledger.epochs) for each in loader):
            model.zero_grad()
            wrapped(batch).square().mean().backward()
            taken = len(numbers) - (options.unequal and rank)
            if not options.uncounted:
                runtime.count_rows(taken)
            make_step()
            step = runtime.status().step
            lines.write(json.dumps([step, numbers.tolist()]) + "\n")
            lines.flush()
            hold = options.holds.get(str(step))
            if hold:
                await_file(hold)
            time.sleep(options.pace_ms / 1000)
            if 0 < step == options.cut:
                save = [Path(options.cuts) / f"step-{step}"]
                runtime.checkpoint(save[0], lambda at: train.save(model, optimizer, "", False, at))
                result["cut"] = asdict(runtime.status())["data"]
            if step >= min(options.stop, options.cut or options.stop):
                break
    result["status"] = asdict(runtime.status())
    train.leave_group()


if __name__ == "__main__":
    train.run_script(Options, run)
