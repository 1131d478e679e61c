"""`python -m mend_lab goodput`: the cost model holds the published table, and its formula equals an
event-by-event account of the same assumptions."""

from __future__ import annotations

import heapq
import json
import math
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mend.errors import ConfigError
from mend_lab.commands import app
from mend_lab.commands.goodput import (
    CHIPS,
    DATA_PARALLEL,
    DAY_S,
    ELASTIC,
    PUBLISHED,
    Assumed,
    assumed_by,
    goodput,
    plot,
    rows_of,
    running,
)

PLAIN = Assumed()


def shares(name: str, assumed: Assumed = PLAIN, racks: tuple[int, ...] = (2, 4, 8, 16)) -> list:
    (row,) = [row for row in rows_of(assumed, racks) if row.name == name]
    return list(row.goodput)


def accounted(chips: float, pause_s: float, assumed: Assumed, failures: int, seed: int) -> float:
    """Goodput of a group, failure by failure. A slice is out for the longer of two Weibull draws:
    an exponentiated Weibull distribution, as published."""
    chance = random.Random(seed)
    rate = chips / (assumed.mtbf_days * DAY_S)
    shape = 0.8
    scale = assumed.repair_s / math.gamma(1 + 1 / shape) / (2 - 2 ** (-1 / shape))
    now_s = useful_s = 0.0
    returns: list[float] = []
    out, slices = 0, chips / assumed.slice_chips
    for _ in range(failures):
        left_s = chance.expovariate(rate)  # of running, until the next failure
        while returns and returns[0] < now_s + left_s:  # comes back while the group runs
            ran_s = heapq.heappop(returns) - now_s
            useful_s += ran_s * (1 - out / slices)
            now_s, left_s, out = now_s + ran_s + pause_s, left_s - ran_s, out - 1
            while returns and returns[0] < now_s:  # comes back in this very pause
                heapq.heappop(returns)
                out -= 1
        useful_s += left_s * (1 - out / slices)
        now_s += left_s
        if chance.random() < assumed.repair_share:
            lengths = (chance.weibullvariate(scale, shape) for _ in range(2))
            heapq.heappush(returns, now_s + max(lengths))
            out += 1
        now_s += pause_s
        while returns and returns[0] < now_s:
            heapq.heappop(returns)
            out -= 1
    return useful_s / now_s


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_cell_is_met_within_2_points(name: str) -> None:
    """Published are whole percents, so both are compared as such. One set of parameters for all."""
    found = [round(100 * share) for share in shares(name)]
    apart = [abs(f - p) for f, p in zip(found, PUBLISHED[name], strict=True)]
    assert max(apart) <= 2, (found, PUBLISHED[name])


@pytest.mark.parametrize("pause_s", [PLAIN.restart_s, PLAIN.elastic_s])
@pytest.mark.parametrize("chips", [75_000, 600_000, 2_400_000])
def test_the_formula_is_what_event_by_event_comes_to(chips: int, pause_s: float) -> None:
    counted = accounted(chips, pause_s, PLAIN, 20_000, seed=1)
    assert goodput(chips, pause_s, PLAIN) == pytest.approx(counted, abs=0.005)


def test_without_failures_all_time_trains() -> None:
    for row in rows_of(replace(PLAIN, mtbf_days=1e12)):
        assert row.goodput == pytest.approx([1.0] * len(CHIPS), abs=1e-6), row.name


def test_one_rack_is_data_parallel_of_its_kind() -> None:
    assert shares("1 racks", racks=(1,)) == shares(ELASTIC)
    alone = replace(PLAIN, takeover_stall_s=0, donor_s=0)
    assert shares("2 racks, restarted whole", alone)[1:] == shares(DATA_PARALLEL)[:-1]


def test_goodput_falls_with_the_stall_of_the_other_racks() -> None:
    free = shares("4 racks, restarted whole", replace(PLAIN, takeover_stall_s=0, donor_s=0))
    slow = shares("4 racks, restarted whole", replace(PLAIN, takeover_stall_s=10))
    for cheap, usual, dear in zip(free, shares("4 racks, restarted whole"), slow, strict=True):
        assert cheap > usual > dear


def test_more_racks_lose_less_and_a_larger_quorum_closes_fewer_rounds() -> None:
    for more, fewer in ((4, 2), (8, 4), (16, 8)):
        pairs = zip(shares(f"{more} racks"), shares(f"{fewer} racks"), strict=True)
        assert all(a > b for a, b in pairs)
    closing = [
        next(row for row in rows_of(PLAIN, quorum=k) if row.name == "4 racks").closing[-1]
        for k in (1, 2, 3, 4)
    ]
    p = running(CHIPS[-1] / 4, PLAIN.elastic_s, PLAIN)
    assert closing[0] == pytest.approx(1 - (1 - p) ** 4)
    assert closing[-1] == pytest.approx(p**4)
    assert closing == sorted(closing, reverse=True)


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ("restart_s", "is not NAME=NUMBER"), ("restart_s=much", "is not NAME=NUMBER"),
        ("nothing=3", "assumes is called 'nothing'"), ("a=b=1", "assumes is called 'a'"),
        ("mtbf_days=0", "a number, 0.001 to 1e[+]12"),
        ("mtbf_days=nan", "a number, 0.001 to 1e[+]12"),
        ("restart_s=inf", "a number, 0 to 1e[+]12"), ("repair_share=1.5", "a number, 0 to 1[.]"),
    ],
)  # fmt: skip
def test_an_assumption_that_cannot_be_is_refused(pair: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        assumed_by([pair])


def test_the_most_extreme_assumptions_have_a_goodput() -> None:
    most = {field.name: 1e12 for field in fields(PLAIN)}
    worst = Assumed(**{**most, "mtbf_days": 1e-3, "repair_share": 1.0})
    none = Assumed(**{**dict.fromkeys(most, 0.0), "mtbf_days": 1e12})
    for assumed in (worst, none):
        for row in rows_of(assumed):
            assert all(0 <= share <= 1 for share in (*row.goodput, *row.closing))


@pytest.mark.parametrize(
    ("name", "why"), [("no/a.svg", "cannot be written"), ("a.bmp", "End it in")]
)
def test_a_picture_that_cannot_be_drawn_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plot(rows_of(PLAIN), tmp_path / name)


def test_the_command_says_that_it_is_a_model_and_what_it_assumes(tmp_path: Path) -> None:
    asked = ["goodput", "--assume", "restart_s=300"]
    shown = CliRunner().invoke(app, [*asked, "--plot", str(tmp_path / "a.svg")])
    assert shown.exit_code == 0, shown.output
    assert "cost model" in shown.output
    assert "restart_s=300" in shown.output
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert told["assumed"]["restart_s"] == 300
    assert "cost model" in told["model"]
    by_name = {row["name"]: row for row in told["rows"]}
    assert by_name[DATA_PARALLEL]["goodput_pct"][0] < 40
    assert by_name[ELASTIC]["published_pct"] == list(PUBLISHED[ELASTIC])
    assert (tmp_path / "a.svg").read_text().count("racks") >= 8


def test_the_docs_have_the_figures_of_the_model() -> None:
    page = (Path(__file__).parents[3] / "docs" / "internals" / "simulator.md").read_text()
    for row in rows_of(PLAIN):
        figures = [str(round(100 * share)) for share in row.goodput]
        if row.published:
            pairs = zip(figures, row.published, strict=True)
            figures = [f"{figure} ({published})" for figure, published in pairs]
        assert f"| {row.name} | {' | '.join(figures)} |" in page
    for field in fields(PLAIN):
        assert f"| `{field.name}` | {getattr(PLAIN, field.name):g} |" in page
