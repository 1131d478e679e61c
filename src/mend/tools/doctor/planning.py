"""What the measured network means for a model: the settings in force, judged as `mend plan` judges
its rows, and what it would recommend."""

from __future__ import annotations

import warnings
from typing import Any

from mend.config.settings import MendConfig
from mend.tools import plan
from mend.tools.doctor.estimate import MARGIN
from mend.tools.doctor.terms import Finding, ok, remark
from mend.tools.plan_command import as_data, exports, outcome, recommendation, row_data, start_of

MEASURED = "measured here"


def planned(
    config: MendConfig, asked: plan.Asked, *, has_step: bool
) -> tuple[dict[str, Any], list[Finding]]:
    """(data for --json, with the text of the recommendation; findings). Without `has_step`,
    `asked.step_ms` is any time, and nothing is recommended."""
    start = ok("start", start_of(asked))
    if not has_step:
        return {}, [start, _without_a_step(config, plan.judge(asked, config))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `examine` has reported them
        rows = plan.choices(asked, plan.base_config(asked.racks))
    chosen, mine = plan.recommended(rows), plan.judge(asked, config)
    data = as_data(asked, rows, chosen, MEASURED)
    data |= {"settings": row_data(mine), "text": recommendation(asked, chosen, MEASURED)}
    return data, [start, _of_settings(asked, mine, chosen)]


def _without_a_step(config: MendConfig, mine: plan.Choice) -> Finding:
    """How long a step must be."""
    took = f"an exchange takes about {mine.longest.total_ms:.0f} ms"
    if not config.concurrent_outer_step or config.tau == 0:
        return remark("overlap", f"{took}; training waits for each (tau=0 or blocking).")
    least_ms = mine.longest.total_ms / MARGIN / config.tau
    hides = f"tau={config.tau} hides it where a step takes {least_ms:.0f} ms or longer"
    return ok("overlap", f"{took}; {hides}")


def _of_settings(asked: plan.Asked, mine: plan.Choice, chosen: plan.Choice) -> Finding:
    exchange, training, link = (" ".join(line.split()) for line in outcome(asked, mine)[:3])
    text = f"{exchange}. {training}. {link}"
    config = mine.config
    hidden = config.concurrent_outer_step and config.tau > 0
    if mine.fits and hidden:
        return ok("overlap", f"These settings fit. {text}")
    change = (
        "See the advice above."
        if not chosen.good
        else "Set " + " ".join(line.removeprefix("export ") for line in exports(chosen))
    )
    waits = "" if hidden else " Training waits for each exchange (tau=0 or blocking)."
    return remark("overlap", f"These settings do not fit.{waits} {text}.", change)
