"""test_joint.py with ranks on GPUs: over NCCL where each rank of a rack has a GPU, else over gloo.

python -m pytest -n 0 -v -rP tests/process/test_joint_on_gpus.py -k 1-gpu
python -m pytest -n 0 -v -rP tests/process/test_joint_on_gpus.py -k 2-gpus
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.process import racks
from tests.process.conftest import Jobs
from tests.process.test_joint import CUTS, Joint, all_same, same, uncut

LIMIT_S = 400.0
"""Of a wait for a rack: CUDA starts, and kernels are compiled."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=[1, 2], ids=["1-gpu", "2-gpus"])
def env(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Shows the ranks so many GPUs."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    monkeypatch.setattr(racks, "LIMIT_S", LIMIT_S)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown.split(",")[: request.param])}


def joint(jobs: Jobs, codec: str, env: dict[str, str]) -> Joint:
    waits: dict[str, Any] = {"wait_timeout_s": LIMIT_S}
    return Joint(jobs, codec, env, device="cuda", config=waits)


def test_racks_end_with_equal_bits_however_they_are_cut(jobs: Jobs, env: dict[str, str]) -> None:
    all_same(joint(jobs, "float32", env).train)


def test_rack_that_is_killed_and_joins_leaves_equal_bits_however_racks_are_cut(
    jobs: Jobs, env: dict[str, str]
) -> None:
    all_same(joint(jobs, "float32", env).rejoin)


@pytest.mark.parametrize("cut", [cut for cut, (ranks, _) in CUTS.items() if ranks == 2])
def test_with_int4_microbatches_change_no_bits_after_a_kill_and_a_join(
    jobs: Jobs, env: dict[str, str], cut: str
) -> None:
    ranks, racks_of = CUTS[cut]
    made = joint(jobs, "int4", env)
    same(cut, made.rejoin(ranks, uncut(racks_of)), made.rejoin(ranks, racks_of))
