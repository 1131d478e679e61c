"""What the tests of level shape begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mend.determinism import enable


@pytest.fixture
def shape_level() -> Iterator[None]:
    with enable(1, "shape"):
        yield


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """Of this process alone."""
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
