"""benchmarks.torchft_cell: the cells of h200 with mend and with torchft's Streaming DiLoCo.

    mend launch --no-witness --racks 2 benchmarks/torchft_cell.py --out runs/torchft
    mend launch --no-witness --racks 2 --nproc-per-rack 2 benchmarks/torchft_cell.py \\
        --parallel fsdp2 --payload bfloat16 --out runs/torchft-fsdp2
    python -m benchmarks.h200_table runs/torchft --save torchft

The same processes, model, start, tokens, optimizer and steps as h200 (same options; the delays are
0, as torchft simulates none). torchft 0.2.0 must be installed. One replica group per rack, gloo
between equal ranks of the racks, a lighthouse in rack 0, all of them on loopback or, with
`mend launch --link`, on the link. `torchft-blocking` exchanges each fragment where it is due
(fragment_sync_delay 0), `torchft-overlap` begins gap - 1 steps earlier, which is the most that
torchft allows; mend's `blocking` and `concurrent` have that overlap as tau. The outer optimizer is
SGD with lr 1, which averages, as mend's does by default. Every cell of torchft exchanges the same
fragments. No calibration: the table's `covered` stays empty.

What differs by design, so that the figures are read with care: torchft exchanges pseudo-gradients
in the weights' type (bf16: half of mend's default bytes; --payload bfloat16 evens that out for
mend), keeps the last merged weights in bf16, and drops the steps made since a fragment was taken
(fragment_update_alpha 0). mend's fragments are of equal size; torchft's are modules, of which the
measured ones hold blocks. `stall_ms` of torchft is all host time inside its two hooks, with what
they wait for on the GPU; mend's counts only waiting for others. torchft's `bytes_sent` is the size
of what is averaged. Losses of the two are not comparable. mend seals what it sends, torchft does
not. torchft's manager and lighthouse live from the first cell to the last, so that their heartbeats
go on in all cells; pinned memory that a cell has freed may stay with the process, which spoils
the column of host memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BEGAN = time.monotonic()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("RUST_LOG", "warn")  # torchft says several lines per step
if not __package__:  # started by its path: the folder that holds `benchmarks` is not searched
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# After the lines above, which they need.
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402
from torchft.coordination import LighthouseServer  # noqa: E402
from torchft.local_sgd import DiLoCo  # noqa: E402
from torchft.manager import Manager  # noqa: E402
from torchft.process_group import ProcessGroupGloo  # noqa: E402

from benchmarks import h200, h200_rank  # noqa: E402
from benchmarks.h200_cells import WARM_UP_MIN, Cell  # noqa: E402
from mend.tools.links import INTERFACE  # noqa: E402

TIMEOUT = timedelta(seconds=120)
LOOPBACK = "127.0.0.1"
HOST = os.environ.get("MEND_ADVERTISE_HOST", LOOPBACK)
"""Where the other rack finds this one: with --link the launcher names it."""


class Gloo(ProcessGroupGloo):
    """Between racks. With --link the launcher has bound the ranks of a rack to `lo`."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        if HOST == LOOPBACK:
            return super()._create_pg(store, rank, world_size)
        inner = os.environ.get("GLOO_SOCKET_IFNAME", "")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        try:
            return super()._create_pg(store, rank, world_size)
        finally:
            os.environ["GLOO_SOCKET_IFNAME"] = inner


class Torchft:
    """One cell: torchft's hooks on the optimizer, and what they cost."""

    def __init__(self, bench: Bench, cell: Cell) -> None:
        self.ms, self.bytes = 0.0, 0
        parts = fragments(bench.model, bench.plan.fragments)
        self._manager = bench.manager
        # torchft takes fragment `step % P`: the same ones in every cell. All ranks do this.
        self._manager.load_state_dict({"step": 0, "batches_committed": 0})
        self._diloco = DiLoCo(
            self._manager, parts, bench.optimizer,
            [torch.optim.SGD(part.parameters(), lr=1.0) for part in parts],
            sync_every=bench.plan.gap * len(parts), use_bucketization=True,
            fragment_sync_delay=cell.tau,
        )  # fmt: skip
        for fragment in self._diloco._fragments:
            size = sum(h200_rank.local(p).nbytes for p in fragment._model_fragment.parameters())
            fragment.prepare_sync = self._timed(fragment.prepare_sync, size)
            fragment.perform_sync = self._timed(fragment.perform_sync, 0)
        self._diloco.__enter__()

    def _timed(self, call: Callable[[], Any], size: int) -> Callable[[], Any]:
        def timed() -> Any:
            began = time.perf_counter()
            found = call()
            self.ms += (time.perf_counter() - began) * 1e3
            self.bytes += size
            if found is False:
                raise RuntimeError("torchft did not commit a round")
            return found

        return timed

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(
            stall_ms_total=self.ms, stall_ms_last=0.0, bytes_sent=self.bytes,
            versions=(self._manager.current_step(),), rounds_missed={}, anchor_digest="",
            last_error="",
        )  # fmt: skip

    def abort(self) -> None:
        self._diloco.__exit__(None, None, None)
        # The next cell registers its own; a manager for each would take seconds to leave.
        self._manager._load_state_dict_fns.clear()
        self._manager._user_state_dicts.clear()


def fragments(model: nn.Module, wanted: int) -> list[nn.Module]:
    """Embedding, head and last norm, and the blocks in equal runs."""
    blocks = list(model.blocks)
    count = min(wanted - 1, len(blocks))
    cuts = [len(blocks) * i // count for i in range(count + 1)]
    ends = nn.ModuleList([model.embed, model.norm, model.head])
    return [ends, *(nn.ModuleList(blocks[cuts[i] : cuts[i + 1]]) for i in range(count))]


class Bench(h200_rank.Bench):
    def _cells(self) -> Iterator[Cell]:
        if self.decides:
            self.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
            port = self.lighthouse.address().rsplit(":", 1)[1]
            self.meeting.decide("lighthouse", {"address": f"http://{HOST}:{port}"})
        self._join_group(self.meeting.decision("lighthouse")["address"])
        measured, gap, tau = self.plan.measured, self.plan.gap, self.plan.gap - 1
        for repeat in range(self.plan.repeats):
            yield Cell(repeat, "none", 0, 0, WARM_UP_MIN, measured)
            # Each measures whole gaps that begin before a capture and end behind an apply.
            turns = [
                Cell(repeat, "blocking", 0, tau, max(WARM_UP_MIN, tau), measured),
                Cell(repeat, "concurrent", 0, tau, max(WARM_UP_MIN, tau), measured),
                Cell(repeat, "torchft-blocking", 0, 0, gap, measured),
                Cell(repeat, "torchft-overlap", 0, tau, gap, measured),
            ]
            yield from turns if repeat % 2 == 0 else turns[::-1]

    def _cell(self, index: int, cell: Cell) -> dict[str, Any]:
        before = self._hooks()
        found = super()._cell(index, cell)
        if self._hooks() != before:
            raise RuntimeError(f"{cell.mode} left hooks to the cells after it")
        return found

    def _hooks(self) -> list[int]:
        """Numbers of hooks of the optimizer, of all optimizers, and of the modules."""
        own, everyone = self.optimizer, import_module("torch.optim.optimizer")
        return [
            len(own._optimizer_step_pre_hooks), len(own._optimizer_step_post_hooks),
            len(everyone._global_optimizer_pre_hooks), len(everyone._global_optimizer_post_hooks),
            sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in self.model.modules()),
        ]  # fmt: skip

    def _join(self, index: int, cell: Cell) -> Any:
        torchft = cell.mode.startswith("torchft")
        return Torchft(self, cell) if torchft else super()._join(index, cell)

    def _join_group(self, lighthouse: str) -> None:
        """One manager per rank; those of a rack meet in the store of its first."""
        name = f"store{self.rack}"
        if self.rank == 0:
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            self.meeting.decide(name, {"port": self._store.port})
        self.manager = Manager(
            pg=Gloo(timeout=TIMEOUT), load_state_dict=None, state_dict=None,
            min_replica_size=2, use_async_quorum=False, timeout=TIMEOUT, quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT, rank=self.rank, world_size=self.ranks, store_addr=HOST,
            store_port=self.meeting.decision(name)["port"], lighthouse_addr=lighthouse,
            hostname=HOST, replica_id=f"rack{self.rack}", init_sync=False,
        )  # fmt: skip


def arguments() -> argparse.Namespace:
    options = h200.arguments()
    # A cell lasts a gap longer than what is measured; there are tokens for so many steps.
    options.steps_max = max(options.steps_max, options.gap * (options.gaps_measured + 1))
    return options


if __name__ == "__main__":
    logging.getLogger("torchft").setLevel(logging.WARNING)
    h200_rank.run(arguments(), BEGAN, Bench)
