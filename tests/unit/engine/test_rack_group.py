"""The groups of a rack's ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mend.engine.io.rack import RackGroup

TEAM = (0,)


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path / 'meeting'}"
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "asked"),
    [("gloo", ["gloo"]), ("cpu:gloo,cuda:nccl", ["gloo", "nccl"])],
)
def test_slices_on_a_gpu_need_nccl_only_where_the_script_has_it(
    meeting: str, monkeypatch: pytest.MonkeyPatch, backend: str, asked: list[str]
) -> None:
    """Ranks that share a GPU cannot: NCCL refuses two of them on one."""
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    group, made = RackGroup([0], 1.0), list[str]()

    def make(ranks: Sequence[int], backend: str = "gloo", thread: str = "") -> Any:
        made.append(backend)
        return object()

    monkeypatch.setattr(group, "_new", make)
    group.team_up([TEAM], cuda=True)
    assert made == asked
    shared = group._teams[TEAM, "cuda"] is group._teams[TEAM, "cpu"]
    assert shared is (backend == "gloo")
