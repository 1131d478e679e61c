"""A training of one rack in this process is recorded, and replayed: through `mend_init` as scripts
call it, with the ranks, threads and sockets of a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mend import MendConfig, session
from mend.config.override import overriding
from mend.errors import ReplayDiffers
from mend.types import Peer
from mend_lab.commands.replay import read_script
from mend_lab.replay.comparison import Finding, file_name, findings_in
from mend_lab.replay.script import encode_script
from mend_lab.replay.settings import ReplaySettings

STEPS = 24


def train(port: int, folder: Path, learning_rate: float = 0.05, **settings: object) -> list[Tensor]:
    """The weights at the end. `folder`: for a checkpoint after half of the steps."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    config = MendConfig(
        rack=0, racks=1, sideband_addr=f"tcp://127.0.0.1:{port}", fragments=2,
        sync_period_steps=8, overlap_steps=2, **settings,
    )  # fmt: skip
    with session(model, config, optimizer) as runtime:
        for step in range(STEPS):
            inputs = torch.randn(8, 4, generator=generator)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == STEPS // 2:
                runtime.checkpoint(folder / "checkpoint")
    return [parameter.detach().clone() for parameter in model.parameters()]


def replay(folder: Path, tapes: Path, job: Callable[[], object]) -> list[Finding]:
    """What the rank found. Raises what `job` does."""
    folder.mkdir()
    path = folder / "script"
    path.write_bytes(encode_script(read_script([tapes])))
    try:
        with overriding(ReplaySettings(path, None)):
            job()
    finally:
        found = findings_in(folder / file_name(Peer(0, 0)))
    return found


def test_a_training_is_replayed_to_the_same_digests_and_another_one_differs(
    tmp_path: Path, free_port: int
) -> None:
    tapes, equal, other = tmp_path / "tapes", tmp_path / "equal", tmp_path / "other"
    before = train(free_port, tmp_path, diagnostics_dir=tapes)
    assert (tmp_path / "checkpoint").is_dir()
    after: list[Tensor] = []
    found = replay(equal, tapes, lambda: after.extend(train(free_port, equal)))
    rounds = len(read_script([tapes]).commits)
    assert [each.kind for each in found] == ["round"] * rounds + ["done"]
    assert rounds > 2
    assert all(map(torch.equal, before, after))
    assert not (equal / "checkpoint").exists(), "the recorded run wrote it"
    with pytest.raises(ReplayDiffers, match="what was captured has checksum"):
        replay(other, tapes, lambda: train(free_port, other, learning_rate=0.06))
    (first,) = findings_in(other / file_name(Peer(0, 0)))
    assert first.kind == "differs"
