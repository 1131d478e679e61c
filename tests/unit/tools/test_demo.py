"""What the demo plans: runs that differ in the exchange only, a delay that fits, its own folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from mend.config import MendConfig
from mend.errors import ConfigError
from mend.tools import demo as demo_module
from mend.tools.demo import DELAY_SHARE, _clear, calibrated_delay_ms, demo, recipes
from mend.tools.demo_report import ALONE, BLOCKING, FREE, OVERLAPPED
from mend.tools.demo_train import mend_settings
from mend.tools.launch import LaunchResult


@pytest.mark.parametrize("quick", [True, False])
def test_the_runs_differ_only_in_the_exchange(quick: bool) -> None:
    planned = {
        name: asdict(r) for name, r in recipes(quick=quick, steps=None, out=Path("x")).items()
    }

    def differ(one: str, other: str) -> set[str]:
        return {key for key in planned[one] if planned[one][key] != planned[other][key]}

    assert list(planned) == [ALONE, BLOCKING, OVERLAPPED, FREE]
    names = {"name", "out"}
    assert differ(ALONE, OVERLAPPED) == names | {"exchange"}
    assert differ(BLOCKING, OVERLAPPED) == names | {"concurrent"}
    assert differ(OVERLAPPED, FREE) == names | {"lockstep", "quorum", "delay_distribution"}


def test_every_run_is_a_config_that_mend_accepts(tmp_path: Path) -> None:
    for recipe in recipes(quick=False, steps=100, out=tmp_path).values():
        config = MendConfig(rack=0, **mend_settings(recipe))
        assert config.tau == recipe.overlap_steps


def test_the_delay_is_half_of_the_fastest_racks_overlap() -> None:
    ranks = {(0, 0): {"wall_s": 10.0, "steps": 100}, (1, 0): {"wall_s": 8.0, "steps": 100}}
    assert calibrated_delay_ms(ranks, overlap_steps=5) == 200.0


def test_every_fragment_is_merged_six_times_and_a_waiting_run_is_much_slower(
    tmp_path: Path,
) -> None:
    recipe = recipes(quick=False, steps=None, out=tmp_path)[OVERLAPPED]
    gap = recipe.period_steps // recipe.fragments
    assert recipe.steps // recipe.period_steps >= 6
    assert gap / (gap + DELAY_SHARE * recipe.overlap_steps) <= 0.7


def test_an_earlier_demo_is_cleared_and_a_strangers_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "result-rack0-rank0.json").write_text("{}")
    _clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        _clear(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_demo_that_is_interrupted_ends_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C had status 2, and printed the tracebacks of the racks."""
    interrupted = LaunchResult({0: 130, 1: 130}, None, interrupted=2)
    monkeypatch.setattr(demo_module, "launch", lambda job, sink: interrupted)
    with pytest.raises(SystemExit) as left:
        demo(quick=True, steps=None, delay_ms=1, nproc_per_rack=1, parallel="ddp", out=tmp_path)
    assert left.value.code == 130
