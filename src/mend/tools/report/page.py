"""The page of a report: one HTML file that needs no other, for a screen of any width and for paper.

page.html.j2 is its template: it has no script, escapes all text, and shows none that is not
printable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from mend.tools.report import charts, lanes, summary
from mend.tools.report.facts import FAULTS_SHOWN, RunFacts, printable
from mend.tools.report.learning import learning
from mend.tools.report.rounds import PHASES, Rounds
from mend.types import VERSION, rack_name

PROTECTIONS = {"keys": "encrypted, with a key", "loopback": "on loopback, without a key"}
COLOURS = 8
"""Colours of racks in page.html.j2; then the same with dashes."""
DASHES = 4


@dataclass(frozen=True)
class Run:
    """One run, read; and what the page says of it."""

    name: str
    facts: RunFacts
    rounds: Rounds
    alone: RunFacts | None = None
    """The newest run of the folder in which no rack exchanged anything."""

    @cached_property
    def totals(self) -> dict[int, summary.Total]:
        return {rack: summary.total(self.facts, rack) for rack in self.facts.racks}

    @property
    def learning(self) -> list[str]:
        """Whether merging helped, in sentences."""
        stall = summary.worst_stall(self.totals)
        return learning(self.facts, self.rounds.settings, stall, self.alone)

    @property
    def charts(self) -> list[charts.Chart]:
        return [*charts.recorded_charts(self.facts), *charts.progress_charts(self.facts)]

    @property
    def timeline(self) -> lanes.Timeline | None:
        return lanes.timeline(self.rounds, self.facts.begin_ns)

    @property
    def notes(self) -> list[str]:
        facts = self.facts
        if not any("loss" in each.curves for each in facts.ranks.values()):
            hint = "No loss was recorded: call runtime.record(loss=loss.item()) after each step."
            return [*self._notes, hint]
        return self._notes

    @property
    def _notes(self) -> list[str]:
        if not self.facts.exchange:
            first = "No exchange (exchange=False): every rack trains for itself."
            return [first, *self.facts.notes]
        none = [] if self.facts.rounds else ["No round was decided."]
        return [*none, *self.facts.notes, *self.rounds.notes]


def page(title: str, runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The whole file. The table of runs is there for several."""
    environment = Environment(
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "short": summary.short,
        "share": "{:.1%}".format,
        "ms": lambda value: f"{value:.1f}" if value < 100 else f"{value:,.0f}",
        "percent": lambda place: f"{place / 10:.4g}%",
    }
    template = environment.from_string(
        Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        title=title,
        runs=runs,
        notes_of_all=notes,
        alone=summary.alone_of((run.name, run.facts, run.totals) for run in runs),
        losses=charts.compared_losses([(run.name, run.facts) for run in runs]),
        words=summary,
        lanes=lanes,
        line_class=_line_class,
        meanings=PHASES,
        protections=PROTECTIONS,
        rack_names=lambda racks: [rack_name(rack) for rack in racks],
        faults_shown=FAULTS_SHOWN,
        version=VERSION,
    )


def _line_class(number: int) -> Any:
    """Of the number of a rack, or of a run."""
    dash = number // COLOURS % DASHES
    return f"c{number % COLOURS}" + (f" d{dash}" if dash else "")
