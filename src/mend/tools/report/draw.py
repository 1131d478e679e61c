"""Draws a panel as SVG. Sets matplotlib up: no window, no global figure, and equal bytes for equal
runs."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

from mend.errors import ConfigError
from mend.tools.report.panels import DARK, MIDDLE, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, HALF_IN = 11.4, 5.6
EMPTY_IN = 1.1

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
    """Raise ConfigError, with the command that installs it, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError(
            "matplotlib",
            "not installed",
            "the figures need it",
            "pip install '.[report]' in a checkout of mend",
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


def _paint(axes: Axes, panel: Panel) -> None:
    # The timeline's legend stands where a title would begin.
    axes.set_title(panel.title, pad=22 if panel.name == "timeline" and not panel.empty else 8)
    if panel.empty:
        axes.set_axis_off()
        text = textwrap.fill(panel.empty, 110 if panel.wide else 52)
        axes.text(0.02, 0.75, text, transform=axes.transAxes, va="top", color=MIDDLE, size=9)
        return
    panel.draw(axes)
