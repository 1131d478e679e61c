"""The page of a report: one HTML file that needs no other, for a laptop and for paper.

page.html.j2 is its template. It escapes all text, and shows none that is not printable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mend.errors import ConfigError
from mend.tools.report import summary
from mend.tools.report.draw import svg_of
from mend.tools.report.facts import FAULTS_SHOWN, RunFacts, clean
from mend.tools.report.learning import learning
from mend.tools.report.panels import (
    PHASE_COLOURS,
    Panel,
    colour,
    participation_panel,
    progress_panels,
    reasons_panel,
    recorded_panels,
    timeline_panel,
)
from mend.tools.report.rounds import MEANS, Rounds
from mend.types import VERSION, rack_name

PROTECTIONS = {"keys": "encrypted, with a key", "loopback": "on loopback, without a key"}


@dataclass(frozen=True)
class Run:
    """One run, read; and what the page says of it."""

    name: str
    facts: RunFacts
    rounds: Rounds

    @cached_property
    def totals(self) -> dict[int, summary.Total]:
        return {rack: summary.total(self.facts, rack) for rack in self.facts.racks}

    @property
    def headline(self) -> str:
        return summary.headline(self.facts, self.totals)

    @property
    def learning(self) -> list[str]:
        """Whether merging helped, in sentences."""
        return learning(self.facts, self.rounds.settings, summary.worst_stall(self.totals))

    @property
    def panels(self) -> list[Panel]:
        """The figures; of a run without rounds only those of training."""
        facts = self.facts
        if not facts.rounds:
            training = {"throughput", "stall"} if facts.exchange else {"throughput"}
            progress = [each for each in progress_panels(facts) if each.name in training]
            return [*recorded_panels(facts), *progress]
        wide = [participation_panel(facts), timeline_panel(self.rounds, facts.begin_ns)]
        return [*recorded_panels(facts), *progress_panels(facts), reasons_panel(facts), *wide]

    @property
    def notes(self) -> list[str]:
        if not self.facts.exchange:
            first = "No exchange (exchange=False): every rack trains for itself."
            return [first, *self.facts.notes]
        none = [] if self.facts.rounds else ["No round was decided."]
        return [*none, *self.facts.notes, *self.rounds.notes]


def page(title: str, runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The whole file. The table of runs is there for several. Raises ConfigError without Jinja."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        remedy = "pip install '.[report]' in a checkout of mend"
        raise ConfigError("jinja2", "not installed", "the page needs it", remedy) from error

    def printable(value: Any) -> Any:
        return value if hasattr(value, "__html__") else clean(str(value))

    environment = Environment(autoescape=True, finalize=printable, undefined=StrictUndefined)
    environment.filters |= {
        "short": summary.short,
        "share": "{:.1%}".format,
        "ms": lambda value: f"{value:.1f}" if value < 100 else f"{value:,.0f}",
    }
    template = environment.from_string(
        Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        title=title,
        runs=runs,
        notes_of_all=notes,
        words=summary,
        svg=svg_of,
        colour=colour,
        phase_colours=PHASE_COLOURS,
        meanings=MEANS,
        protections=PROTECTIONS,
        rack_names=lambda racks: [rack_name(rack) for rack in racks],
        faults_shown=FAULTS_SHOWN,
        version=VERSION,
    )
