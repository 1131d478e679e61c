"""Switches go on together, come back together, and what cannot be set is refused by name."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mend.determinism import DeterministicTrainer, enable, enabling
from mend.determinism.enabling import COSTS, PINNED, UNSEEN, enabled
from mend.errors import ConfigError, NotDeterministic, UsageError


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA has read the environment already: run this file alone")
    for name in PINNED:
        monkeypatch.delenv(name, raising=False)


def switches() -> tuple[object, ...]:
    return (
        torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision(),
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32, *(os.environ.get(name) for name in PINNED),
    )  # fmt: skip


def test_all_switches_are_put_back() -> None:
    before = switches()
    with enable(3) as state:
        assert enabled() is state
        assert switches() == (2, "highest", True, False, False, ":4096:8", "Ring", "Simple")
        assert state.settings["float32_matmul_precision"] == "highest"
        assert state.unseen == UNSEEN
    assert switches() == before
    assert enabled() is None


def test_tf32_is_said() -> None:
    with enable(3, tf32=True) as state:
        assert state.settings["float32_matmul_precision"] == "high"
        assert state.settings["cudnn.allow_tf32"] == "True"


def test_every_generator_repeats() -> None:
    def draws() -> tuple[float, float, float]:
        with enable(11):
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = draws()
    assert draws() == first
    with enable(12):
        assert random.random() != first[0]


class Noise(Dataset[tuple[float, float, float]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_workers_of_a_loader_repeat() -> None:
    def epoch(seed: int) -> list[list[float]]:
        with enable(seed):
            loader = DataLoader(Noise(), batch_size=2, num_workers=2, shuffle=True)
            return [part.tolist() for batch in loader for part in batch]

    first = epoch(5)
    assert epoch(5) == first
    assert epoch(6) != first


def test_an_operation_without_a_deterministic_kernel_raises_its_name() -> None:
    """kthvalue has none on a GPU, put_ without accumulate none anywhere."""
    target, index = torch.zeros(4), torch.tensor([1, 1])
    with enable(1), pytest.raises(RuntimeError, match="put_"):
        target.put_(index, torch.ones(2))
    with enable(1, strict=False), pytest.warns(UserWarning, match="put_"):
        target.put_(index, torch.ones(2))


def test_a_second_one_is_refused() -> None:
    with enable(1), pytest.raises(UsageError, match="enabled already"):
        enable(2)


@pytest.mark.parametrize(("name", "value"), [("NCCL_ALGO", "NVLS"), ("NCCL_PROTO", "^LL")])
def test_a_setting_that_keeps_no_bits_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    before = switches()
    with pytest.raises(NotDeterministic, match=f"{name}={value.replace('^', '.')}"):
        enable(1)
    assert switches() == before
    assert enabled() is None


def test_a_setting_that_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads it when it starts."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(NotDeterministic, match="CUBLAS_WORKSPACE_CONFIG is not set, and CUDA"):
        enable(1)
    assert enabled() is None


def test_a_setting_of_ones_own_that_keeps_bits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with enable(1) as state:
        assert state.settings["NCCL_ALGO"] == "Tree"
    assert os.environ["NCCL_ALGO"] == "Tree"


@pytest.mark.parametrize(("seed", "level"), [(-1, "run"), (2**32, "run"), (1, "nowhere")])
def test_a_value_that_cannot_be_is_refused(seed: int, level: str) -> None:
    with pytest.raises(ConfigError):
        enable(seed, level)  # type: ignore[arg-type]


def test_every_level_says_its_cost_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A tiny block took 6.3 times as long, without a word.
    monkeypatch.setattr(enabling, "_said", set())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("RANK", raising=False)
    for level in ("run", "shape", "everywhere") * 2:
        with enable(3, level) as state:  # type: ignore[arg-type]
            assert state.settings["cost"].startswith(f"CPU: {COSTS[level]['CPU']}")
            line = f'mend level-{level} cost="{state.settings["cost"]}"'
            assert caplog.messages.count(line) == 1
    assert len(caplog.messages) == 3


def test_trainer_of_a_tiny_model_says_its_cost_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(enabling, "_said", {"cost of shape"})
    monkeypatch.delenv("RANK", raising=False)
    for _ in range(2):
        with enable(3, "shape"):
            model = torch.nn.Linear(4, 4)
            DeterministicTrainer(model, torch.optim.SGD(model.parameters()), 3, level="shape")
    (tiny,) = caplog.messages
    assert tiny.startswith("mend level-shape parameters=20 cost=")


def test_cost_is_that_of_the_device_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with enable(3) as state:
        assert state.settings["cost"] == f"GPU: {COSTS['run']['GPU']}"


@pytest.mark.parametrize("level", COSTS)
def test_page_has_the_costs_that_enable_says(level: str) -> None:
    """The page said 2.0 to 2.8 times, enable() 2 to 3.5."""
    page = (Path(__file__).parents[3] / "docs" / "determinism.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{level}` |")]
    cost = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", row.split(" | ")[-1].removesuffix(" |"))
    said = ". ".join(f"{device}: {text}" for device, text in COSTS[level].items())
    assert cost == said.replace(" a plain step", ""), "the head of the table has that"


def test_cost_is_said_by_one_rank_and_not_of_larger_models(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(enabling, "_said", set())
    monkeypatch.setenv("RANK", "1")
    with enable(3, "shape"):
        pass
    monkeypatch.delenv("RANK")
    enabling.say_if_tiny(enabling.TINY_PARAMETERS)
    assert not caplog.messages
