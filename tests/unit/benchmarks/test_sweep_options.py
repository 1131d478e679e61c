"""From arguments to the settings of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.delay_sweep.options import BUILT_IN, settings_of
from benchmarks.delay_sweep.plan import DISTRIBUTIONS, Sweep
from benchmarks.delay_sweep.train import steps_of
from mend.config import MendConfig
from mend.errors import ConfigError
from mend.tools import app
from mend.tools.launch import Job, LaunchResult


def asked(**more: Any) -> Sweep:
    nothing = dict.fromkeys(
        ("delays", "distributions", "seeds", "tau", "period", "fragments", "warm_up", "rounds",
         "step_ms", "size", "script")
    )  # fmt: skip
    usual = {
        "quick": False, "racks": 2, "nproc_per_rack": 1, "device": "cpu", "link": None, "env": (),
    }  # fmt: skip
    arguments = {**nothing, **usual, **more}
    return settings_of(arguments, arguments.pop("script"))


def test_without_arguments_it_is_the_whole_matrix() -> None:
    sweep = asked()
    assert (min(sweep.delays_ms), max(sweep.delays_ms)) == (0, 2000)
    assert sweep.distributions == DISTRIBUTIONS
    assert sweep.seeds >= 3
    assert sweep.overlap_steps is None
    assert sweep.command[:2] == ("-m", BUILT_IN)
    assert sweep.command[-2:] == ("--seed", "{seed}")
    assert sweep.machine["torch"] == torch.__version__


def test_quick_is_small_and_its_arguments_can_be_changed() -> None:
    sweep = asked(quick=True, delays="0, 75ms", step_ms=0.0, tau="auto", env=("A=b=c",))
    assert sweep.delays_ms == (0, 75)
    assert len(sweep.places) * sweep.seeds * 3 == 12
    assert sweep.overlap_steps is None
    assert sweep.env == {"A": "b=c"}
    assert sweep.command[sweep.command.index("--step-ms") + 1] == "0.0"
    assert asked(quick=True).overlap_steps == 16


def test_a_script_of_ones_own_takes_its_own_arguments() -> None:
    sweep = asked(script=["train.py", "--lr", "1", "{seed}"])
    assert sweep.command == ("train.py", "--lr", "1", "{seed}")
    with pytest.raises(ConfigError, match=r"rounds=9: is for the built-in model only"):
        asked(script=["train.py"], rounds=9)
    with pytest.raises(ConfigError, match="none after --"):
        asked(script=[])


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"delays": "0,soon"}, "delays"), ({"tau": "some"}, "tau"), ({"tau": "-3"}, "tau"),
        ({"env": ("A",)}, "env"), ({"env": ("MEND_FRAGMENTS=7",)}, "env"),
        ({"distributions": "normal"}, "distributions"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(more: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(**more)
    assert caught.value.field == field


def test_settings_of_the_shell_count_and_places_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep gone on with under other settings would mix two kinds of figures."""
    monkeypatch.setenv("MEND_CODEC", "bfloat16")
    monkeypatch.setenv("MEND_RACK", "1")
    monkeypatch.setenv("MEND_FRAGMENTS", "64")
    sweep = asked(env=("B=2",))
    assert sweep.env == {"MEND_CODEC": "bfloat16", "B": "2"}
    monkeypatch.delenv("MEND_CODEC")
    assert asked(env=("B=2",)).hash() != sweep.hash()


def test_gpus_are_used_when_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert not asked(device="auto").on_cpu
    assert asked(device="auto", nproc_per_rack=2).on_cpu
    assert asked(device="cpu").on_cpu
    with pytest.raises(ConfigError, match="4 processes need 4 GPUs, and there are 2"):
        asked(device="cuda", nproc_per_rack=2)


def test_the_built_in_script_makes_whole_rounds_behind_its_warm_up() -> None:
    config = MendConfig(sync_period_steps=64, fragments=4, overlap_steps=16)
    assert steps_of(config, warm_up=8, rounds=4) == 16 + 4 * 16
    assert steps_of(config, warm_up=20, rounds=2) == 20 + 2 * 16


def test_help_teaches_and_mistakes_are_one_line() -> None:
    told = " ".join(CliRunner().invoke(app, ["bench", "delay-sweep", "--help"]).output.split())
    for words in ("--quick", "--link", "none, blocking, concurrent", "runtime.record(loss="):
        assert words in told
    found = CliRunner().invoke(app, ["bench", "delay-sweep", "--tau", "x", "--device", "cpu"])
    assert isinstance(found.exception, ConfigError)


def test_a_cell_is_launched_without_a_link_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []

    def interrupted(job: Job, sink: object) -> LaunchResult:
        jobs.append(job)
        return LaunchResult(racks={}, witness=None, interrupted=2)

    monkeypatch.setattr("benchmarks.delay_sweep.run.launch", interrupted)
    command = ["bench", "delay-sweep", "--quick", "--device", "cpu", "--out"]
    for of, more in (("loopback", []), ("slow", ["--link", "400mbit,20ms"])):
        ended = CliRunner().invoke(app, [*command, str(tmp_path / of), *more])
        assert ended.exit_code == 130, ended.output
    assert [job.link for job in jobs] == [None, "400mbit,20ms"]
    assert jobs[0].env["MEND_DIAGNOSTICS_DIR"].endswith("/events")
