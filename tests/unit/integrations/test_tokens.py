"""Parts of the integrations that need no framework."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import mend
from mend import integrations


def callback_of_transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """MendCallback over a stand-in for transformers."""
    names = ("TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments")
    framework = ModuleType("transformers")
    for name in names:
        setattr(framework, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "transformers", framework)
    path = f"{integrations.__path__[0]}/transformers.py"
    spec = importlib.util.spec_from_file_location("mend_callback", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MendCallback(mend.MendConfig(rack=0, racks=1))


def test_tokens_of_the_trainer_on_several_ranks_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer tells every rank the sum over all of them."""
    counted = list[int]()
    for rank in range(3):
        callback = callback_of_transformers(monkeypatch)
        callback._member.runtime = SimpleNamespace(count_tokens=counted.append)
        args = SimpleNamespace(world_size=3, process_index=rank)
        for seen in (200, 200, 300):  # none in the second step: the Trainer does not count
            state = SimpleNamespace(num_input_tokens_seen=seen)
            callback.on_pre_optimizer_step(args, state, None)
    assert counted == [67, 34, 67, 33, 66, 33]
