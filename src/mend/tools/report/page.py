"""One HTML file that needs no other: no script, font or picture from elsewhere. Readable on a
laptop and on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mend.tools.report import html as words
from mend.tools.report.draw import svg_of
from mend.tools.report.facts import RunFacts
from mend.tools.report.panels import (
    Panel,
    colour,
    participation_panel,
    progress_panels,
    reasons_panel,
    recorded_panels,
)
from mend.tools.report.rounds import Rounds
from mend.tools.report.timeline import COLOURS, timeline_panel
from mend.types import VERSION

STYLE = """
:root { color-scheme: light; --dark: #1d2733; --middle: #5b6876; --line: #dde3ea; --card: #fff; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f8; color: var(--dark); line-height: 1.45;
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 20px 24px 48px; }
header { margin-bottom: 14px; }
h1 { font-size: 24px; margin: 0; letter-spacing: -.01em; }
h1 small { font-weight: 400; color: var(--middle); font-size: 15px; margin-left: 8px; }
h2 { font-size: 19px; margin: 30px 0 2px; letter-spacing: -.01em; }
h3 { font-size: 14px; margin: 22px 0 8px; }
p { margin: 2px 0 10px; color: var(--middle); }
.verdicts { display: flex; flex-wrap: wrap; gap: 8px; margin: 10px 0 14px; }
.verdicts span { border: 1px solid var(--line); border-left: 4px solid #9aa5b1; border-radius: 4px;
  background: var(--card); padding: 4px 10px; }
.verdicts .yes { border-left-color: #009e73; }
.verdicts .no { border-left-color: #d55e00; background: #fff5ee; }
.verdicts b { font-weight: 600; margin-right: 6px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 10px;
  margin-bottom: 14px; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: 9px 13px 10px; }
.tiles em { font-style: normal; color: var(--middle); font-size: 12px; display: block; }
.tiles strong { font-size: 21px; font-weight: 650; letter-spacing: -.02em; display: block;
  font-variant-numeric: tabular-nums; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: 12px 14px 8px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--middle); font-size: 12px; margin-top: 4px; }
.sheet { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: 2px 14px 10px; margin-top: 12px; overflow-x: auto; }
.sheet h3 { margin: 10px 0 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--middle); font-size: 12px;
  border-bottom: 1px solid #b8c2cc; padding: 3px 8px; white-space: nowrap; }
td { border-bottom: 1px solid var(--line); padding: 4px 8px; vertical-align: top; }
tr:last-child td { border-bottom: 0; }
:is(.numbers, .both) :is(th, td):not(:first-child) { text-align: right; }
:is(.numbers, .both) td:first-child { white-space: nowrap; }
.both :is(th, td):last-child { text-align: left; }
td small { color: var(--middle); overflow-wrap: anywhere; }
table a { color: #0b5ea8; text-decoration: none; }
td i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
.words :is(th, td):not(:last-child) { white-space: nowrap; }
code { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.note { border-left: 4px solid #e69f00; background: #fffaf0; padding: 6px 12px; margin: 8px 0;
  border-radius: 3px; color: var(--dark); overflow-wrap: anywhere; }
footer { color: var(--middle); font-size: 12px; margin-top: 26px; }
@media screen and (max-width: 820px) { .figures { grid-template-columns: 1fr; } }
@media print {
  @page { size: A4; margin: 11mm; }
  body { background: #fff; font-size: 10.5px; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  figure, .tiles div, .verdicts, tr, .note { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  section + section { break-before: page; }
  .tiles { grid-template-columns: repeat(6, 1fr); gap: 5px; margin-bottom: 8px; }
  .tiles div { padding: 5px 8px; }
  .tiles strong { font-size: 14px; }
  .tiles em, figcaption, th, footer { font-size: 8.5px; }
  .figures { gap: 6px; }
  figure { padding: 6px 8px 4px; }
  .sheet { overflow: visible; break-inside: avoid; margin-top: 8px; }
  th, td { padding: 2px 5px; }
  .words :is(th, td):not(:last-child) { white-space: nowrap; }
code { font-size: 9px; }
}
"""


@dataclass(frozen=True)
class Run:
    """One run, read."""

    name: str
    folder: str
    facts: RunFacts
    rounds: Rounds

    def totals(self) -> dict[int, words.Total]:
        return {rack: words.total(self.facts, rack) for rack in self.facts.racks}

    def title(self) -> str:
        """Where there is no page around the figures."""
        return f"{self.name}: {words.headline(self.facts, self.totals())}"

    def panels(self) -> list[Panel]:
        """Of a run without rounds only what there is of training."""
        facts = self.facts
        if not facts.rounds:
            training = {"throughput", "stall"} if facts.exchange else {"throughput"}
            progress = [each for each in progress_panels(facts) if each.name in training]
            return [*recorded_panels(facts), *progress]
        wide = [participation_panel(facts), timeline_panel(self.rounds, facts.begin_ns)]
        narrow = [*recorded_panels(facts), *progress_panels(facts), reasons_panel(facts)]
        return narrow + wide


def page(title: str, runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The whole file. One run has no table of runs."""
    several = len(runs) > 1
    sections = [_section(run, number, several=several) for number, run in enumerate(runs)]
    body = [
        f"<header><h1>{words.text(title)}<small>mend report</small></h1></header>",
        *(_note(each) for each in notes),
        *([_overview(runs)] if several else []),
        *sections,
        f"<footer>Written by mend {words.text(VERSION)} from the events and tapes of the run. "
        "Digests are of the merged weights; equal digests are equal bits.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{words.text(title)} - mend report</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _overview(runs: Sequence[Run]) -> str:
    """The runs side by side."""
    head = (
        "run", "racks", "steps", "tokens/s", "stall", "rounds", "round time", "loss", "sent",
        "digests equal",
    )  # fmt: skip
    rows = []
    for number, run in enumerate(runs):
        facts, totals = run.facts, run.totals()
        loss, waits = words.loss_of(facts), sorted(facts.waits.values)
        rows.append(
            (
                f'<a href="#run{number}">{words.text(run.name)}</a>',
                str(len(totals)),
                f"{max((one.steps for one in totals.values()), default=0):,}",
                words.short(sum(one.tokens_per_s for one in totals.values())),
                f"{max((one.stall_share for one in totals.values()), default=0.0):.1%}",
                str(facts.rounds),
                words.duration(waits[len(waits) // 2]) if waits else "-",
                f"{loss:.4f}" if loss is not None else "-",
                f"{words.short(sum(one.bytes_sent for one in totals.values()))}B",
                _short_answer(words.same_bits(facts)),
            )
        )
    explained = (
        "<p>Tokens per second of all racks; stall of the worst; loss as recorded, mean of the last "
        "tenth.</p>"
    )
    return f'<div class="sheet"><h3>Runs</h3>{words.table(head, rows)}{explained}</div>'


def _short_answer(verdict: words.Verdict) -> str:
    if verdict.fine is None:
        return "-"
    return "yes" if verdict.fine else "<b>NO</b>"


def _protected(facts: RunFacts) -> str:
    """Which words, and of which racks."""
    found = sorted(set(facts.protection.values()))
    names = {"keys": "encrypted, with a key", "loopback": "on loopback, without a key"}
    said = [names.get(each, f"<b>{words.text(each)}</b>: open to the network") for each in found]
    return f"; {', '.join(said)}" if said else ""


def _section(run: Run, number: int, *, several: bool) -> str:
    facts, totals = run.facts, run.totals()
    job = f" job <b>{words.text(facts.job)}</b>," if facts.job else ""
    heading = f'<h2 id="run{number}">{words.text(run.name)}</h2>' if several else ""
    size = words.text(words.headline(facts, totals))
    figures = [_figure(panel, f"r{number}{panel.name}-") for panel in run.panels()]
    swatch = {rack: colour(rack) for rack in totals}
    phases = words.phases_table(run.rounds, COLOURS)
    measured = f"milliseconds: median / 90th percentile / most, of {run.rounds.measured} rounds"
    sheets = [
        ("Racks", words.racks_table(facts, totals, swatch)),
        (f"Phases of the last rounds <small>({measured})</small>", phases),
        ("Warnings and faults", words.faults_table(facts)),
        ("Digests", words.digests_table(facts)),
        ("Settings", words.settings_table(run.rounds)),
    ]
    return (
        f"<section>{heading}<p>{job} {size}{_protected(facts)}</p>"
        f'<div class="verdicts">{"".join(map(_verdict, words.verdicts(facts, totals)))}</div>'
        f"{''.join(_note(each) for each in _notes(run))}"
        f'<div class="tiles">{"".join(_tile(*each) for each in words.tiles(facts, totals))}</div>'
        f'<div class="figures">{"".join(figures)}</div>'
        + "".join(
            f'<div class="sheet"><h3>{name}</h3>{body}</div>' for name, body in sheets if body
        )
        + "</section>"
    )


def _notes(run: Run) -> list[str]:
    if not run.facts.exchange:
        return ["No exchange (exchange=False): every rack trains for itself.", *run.facts.notes]
    none = [] if run.facts.rounds else ["No round was decided."]
    return [*none, *run.facts.notes, *run.rounds.notes]


def _verdict(verdict: words.Verdict) -> str:
    kind = {True: "yes", False: "no", None: ""}[verdict.fine]
    return (
        f'<span class="{kind}"><b>{words.text(verdict.question)}</b>{words.text(verdict.answer)}'
        "</span>"
    )


def _tile(what: str, figure: str, more: str) -> str:
    said = (words.text(each) for each in (what, figure, more))
    return "<div><em>{}</em><strong>{}</strong><em>{}</em></div>".format(*said)


def _figure(panel: Panel, prefix: str) -> str:
    kind = ' class="wide"' if panel.wide else ""
    caption = "" if panel.empty else f"<figcaption>{words.text(panel.caption)}</figcaption>"
    return f"<figure{kind}>{svg_of(panel, prefix)}{caption}</figure>"


def _note(said: str) -> str:
    return f'<div class="note">{words.text(said)}</div>'
