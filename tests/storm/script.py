"""The training script of the storms: mend's public API only, and a diary of its own.

`python -m tests.storm.script '{"out": ..., "stop": ..., "config": {...}}'`. One JSON line for every
step, flushed before the next one, so that what a killed rack did is known up to its last step. The
judge reads these lines and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.process import train
from tests.process.twin import digest

LOOK_STEPS = 12
"""Every so many steps the merged weights themselves are looked at, not only mend's digest."""
CUT_S = 20.0
"""Longest wait for the others in a checkpoint."""


class Diary:
    """Lines of one life of one rank, each whole on disk when `write` returns. Times are those of
    the machine's monotonic clock, which all its processes share."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **said: Any) -> None:
        line = {"kind": kind, "at_ns": time.monotonic_ns(), **said}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def hash_of(model: nn.Module) -> str:
    """Over the bits of every parameter and running statistic, by name. Collective where the model
    is sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found = hashlib.sha256()
    for name, parameter in sorted(train.of_model(model)):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.update(name.encode())
        found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def seen(status: Any) -> dict[str, Any]:
    """What mend says of itself, to be compared with what the script has counted."""
    ledger = status.ledger
    return {
        "versions": list(status.versions), "digest": status.anchor_digest, "told_step": status.step,
        "told_tokens": status.tokens, "ledger": [ledger.merged, ledger.open, ledger.discarded],
    }  # fmt: skip


class Training:
    """One life of one rank."""

    def __init__(self, told: dict[str, Any], diary: Diary) -> None:
        self._told, self._diary = told, diary
        self._rack, self._rank = int(os.environ["MEND_RACK"]), int(os.environ.get("RANK", "0"))
        self._folder = Path(told["stop"]).parent
        self._model = train.build("normed", self._rack)
        self._wrapped: nn.Module = self._model
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            torch.distributed.init_process_group("gloo")
            self._wrapped = train.spread(self._model, told["parallel"])
        self._optimizer = train.optimizer_of(self._model)
        self._step = self._tokens = 0
        self._runtime: Any = None
        self._pending: Any = None
        """The newest checkpoint."""

    def run(self) -> None:
        import mend

        resume = Path(self._told["resume"]) if self._told["resume"] else None
        if resume is not None:
            self._load(resume / f"rack-{self._rack}")
        config = mend.MendConfig(**self._told["config"])
        with mend.session(self._wrapped, config, self._optimizer, resume=resume) as runtime:
            self._runtime = runtime
            if resume is None:
                self._step = runtime.status().step  # of a rack that joins: its donor's
            began = hash_of(self._model)
            with runtime.anchor_weights():
                weights = hash_of(self._model)
            named = {"resumed": resume.name} if resume is not None else {}
            state = digest(self._optimizer.state_dict())
            self._write("start", model=began, weights=weights, state=state, **named)
            stopped, cuts = self._asked()
            while not stopped:
                self._train()
                stopped, now = self._asked()
                if now > cuts:
                    cuts = now
                    self._cut(f"cut-{now}")
            self._await_cut()
        self._write("end", weights=hash_of(self._model))
        train.leave_group()

    def _write(self, kind: str, **more: Any) -> None:
        status = seen(self._runtime.status())
        self._diary.write(kind, step=self._step, tokens=self._tokens, **status, **more)

    def _train(self) -> None:
        self._step += 1
        loss = train.loss_of(self._wrapped, self._rack, self._rank, self._step)
        self._optimizer.zero_grad()
        loss.backward()
        tokens = train.tokens_of(self._rack, self._step)
        self._tokens += tokens
        began_ns = time.monotonic_ns()
        self._runtime.count_tokens(tokens)
        self._optimizer.step()
        inside_ns = time.monotonic_ns() - began_ns
        look = {}
        if self._step % LOOK_STEPS == 0:
            with self._runtime.anchor_weights():
                look = {"weights": hash_of(self._model)}
        look["state"] = digest(self._optimizer.state_dict())
        slept_ns = time.monotonic_ns()
        time.sleep(self._told["pace_ms"] / 1000)
        late_ms = (time.monotonic_ns() - slept_ns) / 1e6 - self._told["pace_ms"]
        self._write("step", inside_ms=inside_ns / 1e6, late_ms=late_ms, **look)

    def _cut(self, name: str) -> None:
        from mend.errors import CheckpointError

        began_ns, error = time.monotonic_ns(), ""
        self._await_cut()
        folder = self._folder / "cuts" / name
        try:
            self._pending = self._runtime.async_checkpoint(folder, self._save, timeout_s=CUT_S)
        except CheckpointError as failed:
            error = str(failed)
        took_ms = (time.monotonic_ns() - began_ns) / 1e6
        self._write("cut", name=name, ms=took_ms, error=error)

    def _await_cut(self) -> None:
        """One that some rack could not write is none, and no reason to end."""
        from mend.errors import CheckpointError

        if self._pending is not None:
            with contextlib.suppress(CheckpointError):
                self._pending.result()
        self._pending = None

    def _save(self, folder: Path) -> Callable[[], None]:
        """A copy, which is written while training goes on."""
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        counted = {"step": self._step, "tokens": self._tokens}
        kept = copy.deepcopy({**state, **counted})
        return lambda: torch.save(kept, folder / f"script-{self._rank}.pt")

    def _load(self, folder: Path) -> None:
        """What this script saved there; nothing, if its rack was not in that checkpoint."""
        if not folder.exists():
            return
        sharded = self._told["parallel"] == "fsdp2" and torch.distributed.is_initialized()
        state = torch.load(folder / f"script-{self._rank}.pt", weights_only=not sharded)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._tokens = state["step"], state["tokens"]

    def _asked(self) -> tuple[bool, int]:
        """Whether the harness has said that training is over, and how many checkpoints it has
        asked for: all ranks of a rack hear it together."""
        cuts = [int(path.name.removeprefix("ask-")) for path in self._folder.glob("ask-*")]
        flags = torch.tensor([int(Path(self._told["stop"]).exists()), max(cuts, default=0)])
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        return bool(flags[0]), int(flags[1])


def main() -> None:
    torch.set_num_threads(1)
    told = json.loads(sys.argv[1])
    diary = Diary(Path(told["out"].format(rank=os.environ.get("RANK", "0"))))
    try:
        Training(told, diary).run()
    except BaseException as error:
        diary.write("error", name=type(error).__name__, text=str(error))
        raise


if __name__ == "__main__":
    main()
