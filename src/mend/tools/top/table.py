"""Draws the picture of a job for a terminal of any size. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mend.tools.top.picture import Picture, RackLine, RoundLine

SLIM, NARROW, WIDE, WIDER = 56, 72, 92, 116
"""Terminal widths from which there is room for further columns."""

RACKS_MIN = 3
"""Racks that are shown however low the terminal is."""

NOTHING = "-"

STYLES = {
    "running": "green",
    "starting": "cyan",
    "joining": "cyan",
    "leaving": "cyan",
    "ended": "dim",
    "absent": "dim",
    "silent": "red",
    "nobody": "red",
}


def screen_of(picture: Picture, width: int, height: int | None = None) -> RenderableType:
    """`height` None: as long as it takes, no row is left out and no reason is cut."""
    notices = [("! " + each, "yellow") for each in picture.notices]
    notices += [("! " + each, "red") for each in picture.silent]
    head = _head(picture)
    racks_max, rounds_max = len(picture.racks), len(picture.rounds)
    if height is not None:
        left = height - len(head) - 4 - len(notices)  # two headings, two blank lines
        rounds_max = _fitting(picture.in_flight, max(2, left - racks_max))
        racks_max = _fitting(racks_max, left - rounds_max - (picture.in_flight > rounds_max))
        racks_max = max(RACKS_MIN, racks_max)
    parts: list[RenderableType] = [*head]
    if picture.racks:
        parts += [Text(), *_racks(picture.racks, width, racks_max)]
    if picture.fragments:
        parts += [Text(), *_rounds(picture, rounds_max, whole=height is None)]
    sentences = [Text(text, style) for text, style in notices]
    parts += sentences if height is None else map(_line, sentences)
    return Group(*parts)


def _fitting(count: int, room: int) -> int:
    """Return how many of `count` lines to show; the line that counts the rest needs room, too."""
    return count if count <= room else max(0, room - 1)


def _line(text: Text) -> Text:
    """One line of the terminal, cut where it ends."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _head(picture: Picture) -> list[Text]:
    """Return the lines that name the job and who leads it."""
    title = Text("mend top  ")
    title.append(picture.job or "no job", "bold").append("  ")
    title.append(_STATES[picture.state], STYLES[picture.state])
    if not picture.racks and picture.state == "nobody":
        return [_line(title)]
    live = sum(line.state in ("running", "joining") for line in picture.racks)
    title.append(f"  {live} of {picture.configured} racks training")
    about = [f"{picture.coordinator} coordinates"]
    if picture.ballot > 1:
        about[0] += f" since take-over {picture.ballot - 1}"
    if picture.fragments:
        about.append(
            f"P={picture.fragments} H={picture.period_steps} tau={picture.overlap_steps} "
            f"K={picture.merge_min_racks}" + (" lockstep" if picture.lockstep else "")
        )
    rounds = f"{picture.commits} rounds committed"
    about.append(f"{rounds}, last: {picture.closed_by}" if picture.closed_by else rounds)
    lines = [_line(title), _line(Text("  ".join(about), "dim"))]
    if picture.participation:
        lines.append(_line(Text(f"of the newest: {picture.participation}", "dim")))
    if picture.data is not None:
        lines.append(_line(Text(_data(picture.data), "dim")))
    return lines


def _data(rows: dict[str, int | str]) -> str:
    text = "data: {done} rows done, {open} open, {left} left".format_map(rows)
    if rows["given_again"]:
        text += f", {rows['given_again']} given out again"
    return f"{text}; {rows['epoch']}"


_STATES = {
    "nobody": "nobody answers",
    "starting": "starting",
    "running": "running",
    "leaving": "leaving",
    "ended": "the job has ended",
}


# ------------------------------------------------------------------ racks


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    of: Callable[[RackLine], str]
    width_min: int = 0
    left: bool = False


def _state(line: RackLine) -> str:
    if line.state == "silent" and line.silent_s is not None:
        return f"silent {_span(line.silent_s)}"
    if line.slow is not None and line.state == "running":
        return f"slow {line.slow:.1f}x"
    return line.state


COLUMNS = (
    Column("rack", lambda r: str(r.rack)),
    Column("state", _state, left=True),
    Column("step", lambda r: _whole(r.step)),
    Column("lag", lambda r: _whole(r.lag_steps)),
    Column("steps/s", lambda r: _number(r.steps_per_s)),
    Column("ms/step", lambda r: _number(r.step_ms), WIDE),
    Column("tokens/s", lambda r: _number(r.tokens_per_s), NARROW),
    Column("behind", lambda r: _whole(r.behind), SLIM),
    Column("stall", lambda r: _share(r.stall_share), SLIM),
    Column("missed", lambda r: _whole(r.missed), WIDE),
    Column("out B/s", lambda r: _number(r.sent_per_s), NARROW),
    Column("in B/s", lambda r: _number(r.received_per_s), NARROW),
    Column("recorded", lambda r: _recorded_values(r), WIDER, left=True),
    Column("source", lambda r: r.source or NOTHING, WIDER, left=True),
)


def _racks(lines: tuple[RackLine, ...], width: int, shown_max: int) -> list[RenderableType]:
    columns = [column for column in COLUMNS if width >= column.width_min]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.name, justify="left" if column.left else "right", no_wrap=True)
    for line in lines[:shown_max]:
        style = "yellow" if line.slow is not None else STYLES[line.state]
        table.add_row(
            *(Text(column.of(line), style if column.of is _state else "") for column in columns)
        )
    more = len(lines) - len(lines[:shown_max])
    return [table, *([_line(Text(f"and {more} more racks", "dim"))] if more else [])]


def _recorded_values(line: RackLine) -> str:
    pairs = [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in line.recorded.items()
    ]
    return " ".join(pairs) or NOTHING


# ------------------------------------------------------------------ rounds


def _rounds(picture: Picture, shown_max: int, *, whole: bool) -> list[RenderableType]:
    """`whole`: why a round waits takes more than one line, if it has to."""
    versions = " ".join(map(str, picture.versions))
    more = " ..." if picture.fragments > len(picture.versions) else ""
    count = picture.in_flight
    title = f"{count or 'no'} round{'' if count == 1 else 's'} in flight"
    heading = Text(title, "bold").append(f"   versions {versions}{more}" if versions else "", "dim")
    shown = picture.rounds[:shown_max]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for name in ("fragment", "phase", "for", "racks"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", no_wrap=not whole, overflow="fold" if whole else "ellipsis", ratio=1)
    for each in shown:
        table.add_row(*map(Text, _round(each)))
    rest = count - len(shown)
    parts: list[RenderableType] = [_line(heading), *([table] if shown else [])]
    return [*parts, *([_line(Text(f"and {rest} more", "dim"))] if rest else [])]


def _round(each: RoundLine) -> tuple[str, ...]:
    racks = ",".join(map(str, each.racks))
    who = "merged from" if each.phase == "merging" else "offers of"
    return (
        f"fragment {each.fragment} to version {each.version}",
        each.phase,
        _span(each.for_s) if each.for_s is not None else "",
        f"{who} {racks}" if racks else "no offer",
        each.why,
    )


# ------------------------------------------------------------------ numbers for people


def _whole(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def _number(value: float | None) -> str:
    """Three digits that mean something: 0.123, 12.3, 4.56k, 7.8M."""
    if value is None:
        return NOTHING
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            digits = 0 if value == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f}{unit}"
        value /= 1000
    return f"{value:.0f}P"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f}%"


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
