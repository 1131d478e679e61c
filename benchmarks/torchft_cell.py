"""benchmarks.torchft_cell: the cells of h200 with torchft's Streaming DiLoCo in place of mend.

    mend launch --no-witness --racks 2 benchmarks/torchft_cell.py --out runs/torchft
    python -m benchmarks.h200_table runs/torchft --save torchft

The same model, start, tokens, optimizer and steps as h200 (same options; the delays are 0, as
torchft simulates none). torchft 0.2.0 must be installed. One replica group per rack, gloo between
them over loopback, a lighthouse in rack 0. `torchft-blocking` exchanges each fragment where it is
due (fragment_sync_delay 0), `torchft-overlap` begins gap - 1 steps earlier, which is the most that
torchft allows. The outer optimizer is SGD with lr 1, which averages, as mend's does by default.

What differs by design, so that the figures are read with care: torchft exchanges pseudo-gradients
in the weights' type (bf16: half of mend's default bytes; --payload bfloat16 evens that out for
mend), keeps the last merged weights in bf16, and drops the steps made since a fragment was taken
(fragment_update_alpha 0). `stall_ms` here is all host time inside torchft's two hooks, with what
they wait for on the GPU; mend's counts only waiting for others. `bytes_sent` is the size of what is
averaged. Losses are not mend's.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
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

TIMEOUT = timedelta(seconds=120)
HOST = "127.0.0.1"


class Torchft:
    """One cell: torchft's hooks on the optimizer, and what they cost."""

    def __init__(self, bench: Bench, cell: Cell) -> None:
        self.ms, self.bytes = 0.0, 0
        parts = fragments(bench.model, bench.plan.fragments)
        self._manager = bench.manager
        self._diloco = DiLoCo(
            self._manager, parts, bench.optimizer,
            [torch.optim.SGD(part.parameters(), lr=1.0) for part in parts],
            sync_every=bench.plan.gap * len(parts), use_bucketization=True,
            fragment_sync_delay=cell.tau,
        )  # fmt: skip
        for fragment in self._diloco._fragments:
            size = sum(p.numel() * p.element_size() for p in fragment._model_fragment.parameters())
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
    """Embedding and last norm, and the blocks in equal runs."""
    blocks = list(model.blocks)
    count = min(wanted - 1, len(blocks))
    cuts = [len(blocks) * i // count for i in range(count + 1)]
    ends = nn.ModuleList([model.embed, model.norm])
    return [ends, *(nn.ModuleList(blocks[cuts[i] : cuts[i + 1]]) for i in range(count))]


class Bench(h200_rank.Bench):
    def _cells(self) -> Iterator[Cell]:
        if self.decides:
            self.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
            port = self.lighthouse.address().rsplit(":", 1)[1]
            self.meeting.decide("lighthouse", {"address": f"http://{HOST}:{port}"})
        self._join_group(self.meeting.decision("lighthouse")["address"])
        measured, tau = self.plan.measured, self.plan.gap - 1
        for repeat in range(self.plan.repeats):
            yield Cell(repeat, "none", 0, 0, WARM_UP_MIN, measured)
            yield Cell(repeat, "torchft-blocking", 0, 0, self.plan.gap, measured)
            yield Cell(repeat, "torchft-overlap", 0, tau, self.plan.gap, measured)

    def _join(self, index: int, cell: Cell) -> Any:
        return Torchft(self, cell)

    def _join_group(self, lighthouse: str) -> None:
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=None, state_dict=None,
            min_replica_size=2, use_async_quorum=False, timeout=TIMEOUT, quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT, rank=0, world_size=1, store_addr=HOST,
            store_port=self._store.port, lighthouse_addr=lighthouse, hostname=HOST,
            replica_id=f"rack{self.rack}", init_sync=False,
        )  # fmt: skip


if __name__ == "__main__":
    logging.getLogger("torchft").setLevel(logging.WARNING)
    h200_rank.run(h200.arguments(), BEGAN, Bench)
