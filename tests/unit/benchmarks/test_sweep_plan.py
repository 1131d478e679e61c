"""What a sweep measures, and in which order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from benchmarks.delay_sweep.plan import (
    BLOCKING,
    CONCURRENT,
    MODES,
    NONE,
    Cell,
    Place,
    Sweep,
    calibration,
    cells,
    command_of,
    counted_from,
    environment,
    overlaps,
)
from mend import MendConfig
from mend.errors import ConfigError
from tests.unit.benchmarks.sweeps import settings

EVERYTHING = {"distributions": ("constant", "bimodal", "long_tail"), "delays_ms": (0.0, 50.0, 80.0)}


def test_all_modes_of_a_place_run_next_to_each_other_and_each_is_first_at_times() -> None:
    sweep = settings(**EVERYTHING, seeds=3)
    found = list(cells(sweep, overlaps(sweep, 20.0, 0.0)))
    assert len(found) == len({cell.key for cell in found}) == 3 * 7 * 3
    firsts = []
    for at in range(0, len(found), 3):
        trio = found[at : at + 3]
        assert len({(cell.place, cell.seed, cell.overlap_steps) for cell in trio}) == 1
        assert {cell.mode for cell in trio} == set(MODES)
        firsts.append(trio[0].mode)
    assert set(Counter(firsts).values()) == {7}
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)
    assert found[0].place != found[21].place, "the order of places turns, too"


def test_without_a_delay_there_is_nothing_to_distribute() -> None:
    places = settings(**EVERYTHING).places
    assert [place.name for place in places] == [
        "constant-0ms", "constant-50ms", "bimodal-50ms", "long_tail-50ms",
        "constant-80ms", "bimodal-80ms", "long_tail-80ms",
    ]  # fmt: skip


def test_tau_is_given_or_covers_nearly_every_round() -> None:
    assert set(overlaps(settings(), 20.0, 10.0).values()) == {8}
    sweep = settings(**EVERYTHING, overlap_steps=None)
    taus = {place.name: tau for place, tau in overlaps(sweep, 20.0, 10.0).items()}
    assert taus["constant-0ms"] == 1  # 15 ms of exchange beside training
    assert taus["constant-80ms"] == 5  # 95 ms
    assert taus["bimodal-80ms"] == 6  # 80 * 1.29 + 15 = 118.2 ms
    assert taus["long_tail-80ms"] > taus["bimodal-80ms"]
    capped = overlaps(settings(overlap_steps=None), 1.0, 10.0)
    assert max(capped.values()) == 19, "below the period, whatever the delay"


def test_calibration_is_a_step_alone_and_an_exchange_that_is_waited_for() -> None:
    alone, waited = calibration(settings(overlap_steps=None))
    assert (alone.mode, waited.mode) == (NONE, BLOCKING)
    assert {alone.place.delay_ms, waited.place.delay_ms} == {0.0}
    assert alone.key == "calibration-constant-0ms-none"


def test_a_cell_is_made_by_settings_that_mend_itself_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sweep = settings()
    place = Place(delay_ms=62.5, distribution="bimodal")
    for mode in MODES:
        cell = Cell(seed=4, place=place, mode=mode, overlap_steps=5)
        for name, value in environment(sweep, cell).items():
            monkeypatch.setenv(name, value)
        config = MendConfig()
        assert (config.exchange, config.lockstep) == (mode != NONE, True)
        assert config.concurrent_outer_step == (mode != BLOCKING)
        assert (config.sync_period_steps, config.fragments, config.tau) == (20, 2, 5)
        assert (config.racks, config.merge_min_racks) == (2, 2)
        assert config.simulated_merge_delay_ms == 62.5
        assert config.simulated_merge_delay_distribution == "bimodal"
        assert config.simulated_merge_delay_seed == 4
    assert command_of(sweep, cell) == ("train.py", "--seed", "4")


def test_counted_steps_begin_when_merges_are_applied() -> None:
    place = settings().places[0]
    late, early = (Cell(seed=0, place=place, mode=CONCURRENT, overlap_steps=tau) for tau in (12, 2))
    assert counted_from(settings(), late) == 12
    assert counted_from(settings(), early) == 4


def test_settings_survive_a_file_and_every_one_of_them_counts() -> None:
    sweep = settings(env={"A": "1"}, link="1gbit,2ms")
    again = msgspec.convert(sweep.fields(), Sweep)
    assert again == sweep
    assert again.hash() == sweep.hash()
    others = [settings(seeds=3), settings(machine={"cpu": "slide rule"}), settings(env={"A": "2"})]
    assert len({other.hash() for other in [sweep, *others]}) == 4


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"racks": 1}, "racks"), ({"seeds": 0}, "seeds"), ({"fragments": 0}, "fragments"),
        ({"period_steps": 1, "overlap_steps": None}, "period"), ({"overlap_steps": 20}, "tau"),
        ({"overlap_steps": 0}, "tau"), ({"delays_ms": ()}, "delays"),
        ({"delays_ms": (1.0, 1.0)}, "delays"), ({"delays_ms": (-1.0,)}, "delays"),
        ({"delays_ms": (float("nan"),)}, "delays"),
        ({"distributions": ("gaussian",)}, "distributions"),
        ({"distributions": ()}, "distributions"),
        ({"distributions": ("bimodal", "bimodal")}, "distributions"), ({"link": "fast"}, "--link"),
        ({"link": ""}, "--link"),
        ({"env": {"MEND_LOCKSTEP": "false"}}, "env"),
    ],
)  # fmt: skip
def test_settings_that_no_run_could_have_are_refused(more: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**more)
    assert caught.value.field == field
    assert caught.value.remedy
