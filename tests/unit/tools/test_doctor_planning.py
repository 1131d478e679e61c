"""What `mend doctor` says of a measured network is what `mend plan` says of the same figures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from mend.config import MendConfig
from mend.tools import app, plan
from mend.tools.doctor.planning import planned
from mend.tools.doctor.terms import Finding

PARAMS, STEP_MS, MERGE_NS = 1_500_000_000, 400.0, 1.25


def config(**given: Any) -> MendConfig:
    return MendConfig(**{"rack": 0, "racks": 2, **given})


def asked(inbound_mbit: float, step_ms: float = STEP_MS) -> plan.Asked:
    link = plan.measured_link(inbound_mbit, 20.0)
    return plan.Asked(PARAMS, step_ms, link, 2, 8, MERGE_NS, device="cpu")


def overlap(found: list[Finding]) -> Finding:
    return next(each for each in found if each.topic == "overlap")


def of_plan(*more: str) -> str:
    arguments = ["--params", "1.5B", "--step-ms", "400", "--nproc-per-rack", "8", "--racks", "2"]
    arguments += ["--device", "cpu", "--merge-ns", str(MERGE_NS), *more]
    answer = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "500"})
    assert answer.exit_code in (0, 1), answer.output
    return answer.output


@pytest.mark.parametrize(("mbit", "link"), [(900, "1gbit,20ms"), (9, "10mbit,20ms")])
def test_both_say_the_same_of_the_same_figures(mbit: float, link: str) -> None:
    """90 % of a link's rate are payload; of 10 Mbit/s nothing fits."""
    data, _ = planned(config(), asked(mbit), has_step=True)
    text = of_plan("--link", link)
    assert f"link {link}" in text
    assert text.startswith(data["text"].replace("(measured here)", "(given)"))
    assert ("No setting fits" in data["text"]) == (mbit == 9)
    same = json.loads(of_plan("--link", link, "--json"))
    for name in ("recommended", "exports", "advice", "start_s"):
        assert data[name] == same[name]


def test_settings_that_do_not_fit_are_answered_with_those_that_plan_recommends() -> None:
    data, found = planned(config(), asked(900), has_step=True)
    lacking = overlap(found)
    assert lacking.severity == "note"
    assert "These settings do not fit." in lacking.found
    assert "tau hides" in lacking.found
    for line in data["exports"]:
        assert line.removeprefix("export ") in lacking.change
    names = dict(line.removeprefix("export ").split("=") for line in data["exports"])
    taken = {name.removeprefix("MEND_").lower(): value for name, value in names.items()}
    whole = {n: v if not v.isdigit() else int(v) for n, v in taken.items() if n != "racks"}
    seconds = {n: float(str(v)) if n.endswith("_s") else v for n, v in whole.items()}
    _, again = planned(config(**seconds), asked(900), has_step=True)
    assert overlap(again).severity == "ok", "the advice helps"


def test_where_nothing_fits_the_advice_is_not_repeated() -> None:
    _, found = planned(config(), asked(9), has_step=True)
    assert overlap(found).change == "See the advice above."


@pytest.mark.parametrize("blocking", [{"concurrent_outer_step": False}, {"overlap_steps": 0}])
def test_without_an_overlap_training_waits(blocking: dict[str, Any]) -> None:
    _, found = planned(config(**blocking), asked(90_000), has_step=True)
    assert "Training waits for each exchange" in overlap(found).found
    _, found = planned(config(**blocking), asked(90_000), has_step=False)
    assert "training waits for each" in overlap(found).found


def test_without_a_step_time_it_says_how_long_a_step_must_be() -> None:
    data, found = planned(config(), asked(900, 1.0), has_step=False)
    assert data == {}
    least = float(overlap(found).found.split("a step takes ")[1].split(" ms")[0])
    assert plan.judge(asked(900, least + 1), config()).longest.total_ms <= 0.8 * 8 * (least + 1)


def test_both_say_that_equal_weights_are_not_copied() -> None:
    for has_step in (True, False):
        _, found = planned(config(), asked(900), has_step=has_step)
        (start,) = [each for each in found if each.topic == "start"]
        assert "racks that begin with equal weights (one seed, or" in start.found
        assert start.found in of_plan("--link", "1gbit,20ms")
