"""Panels as SVG for the page, and all of them as one PNG. Only here is matplotlib set up; no
window, no global figures, and the same run gives the same bytes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mend.errors import ConfigError
from mend.tools.report.panels import DARK, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, HALF_IN = 11.4, 5.6
EMPTY_IN = 1.1
DPI = 110
PNG_HEIGHT_IN_MAX = 200.0

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": DARK,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "mend",
    "path.simplify": True,
}

NOTHING = {"Date": None, "Creator": None, "Format": None, "Type": None}
"""No metadata: neither time nor addresses."""


def check_matplotlib() -> None:
    """Raises ConfigError with the command that installs it."""
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError(
            "matplotlib", "not installed", "the figures need it", "pip install 'mend-torch[report]'"
        ) from error


def svg_of(panel: Panel, prefix: str) -> str:
    """`<svg ...>`, with ids that begin with `prefix`: several share a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with warnings.catch_warnings(), rc_context(STYLE):
        warnings.simplefilter("ignore")  # a name from a file may have letters that no font has
        width_in = WIDTH_IN if panel.wide else HALF_IN
        height_in = EMPTY_IN if panel.empty else panel.height_in
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        _paint(figure.subplots(), panel)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=NOTHING, transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}", text)
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{panel.name}" ', text, count=1)


def write_png(path: Path, runs: Sequence[tuple[str, Sequence[Panel]]]) -> None:
    """All panels of all runs below each other."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with warnings.catch_warnings(), rc_context(STYLE):
        warnings.simplefilter("ignore")
        rows = [(title, row) for title, panels in runs for title, row in _rows(title, panels)]
        heights = [max(panel.height_in for panel in row) + 0.15 for _, row in rows]
        heights = [
            high + (0.35 if title else 0) for high, (title, _) in zip(heights, rows, strict=True)
        ]
        high_in = min(sum(heights), PNG_HEIGHT_IN_MAX)
        room = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
        figure = Figure(figsize=(WIDTH_IN, high_in), layout=room, facecolor="white")
        parts = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)
        for part, (title, row) in zip(parts[:, 0], rows, strict=True):
            if title:
                part.suptitle(title, x=0.012, ha="left", weight="bold", size=13, color=DARK)
            axes = part.subplots(1, 2 if not row[0].wide else 1, squeeze=False)[0]
            for each, panel in zip(axes, row, strict=False):
                _paint(each, panel)
            for spare in axes[len(row) :]:
                spare.set_axis_off()
        figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})


def _rows(title: str, panels: Sequence[Panel]) -> list[tuple[str, list[Panel]]]:
    """Two narrow ones or a wide one; the first has the title of the run."""
    rows: list[list[Panel]] = []
    for panel in panels:
        last = rows[-1] if rows else []
        if last and not last[0].wide and not panel.wide and len(last) == 1:
            last.append(panel)
        else:
            rows.append([panel])
    return [(title if place == 0 else "", row) for place, row in enumerate(rows)]


def _paint(axes: Axes, panel: Panel) -> None:
    # The timeline's legend stands where a title would begin.
    axes.set_title(panel.title, pad=22 if panel.name == "timeline" and not panel.empty else 8)
    if panel.empty:
        axes.set_axis_off()
        words, lines = panel.empty.split(), [""]
        for word in words:
            if len(lines[-1]) + len(word) > (110 if panel.wide else 52):
                lines.append("")
            lines[-1] += f"{word} "
        axes.text(
            0.02,
            0.75,
            "\n".join(lines),
            transform=axes.transAxes,
            va="top",
            color="#6b7785",
            size=9,
        )
        return
    panel.draw(axes)
