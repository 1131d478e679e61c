"""The table at many sizes: nothing wraps, what does not fit goes in a known order."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from mend.status.messages import DataSeen, JobStatus
from mend.tools.top.picture import Answer, Picture, RoundLine, picture_of
from mend.tools.top.table import screen_of
from mend.types import SECOND, WITNESS
from tests.unit.status.seen import rack_seen, training_seen, view

LONG = "a reason that is much longer than any terminal is wide " * 4


def picture(racks: int = 2, **changes: Any) -> Picture:
    """The last rack is slow, and does not answer."""
    members = tuple(rack_seen(rack, step=100 - rack) for rack in range(racks - 1))
    members += (rack_seen(racks - 1, step=40, step_ns=SECOND * 21 // 100, behind=3),)
    loss = training_seen(recorded=(("loss", 2.345678),), missed=2)
    of_rack: list[JobStatus] = [view(rack, training=loss) for rack in range(racks - 1)]
    coordinator = view(
        WITNESS, racks=members, training=None, coordinates=True, coordinator=WITNESS, decided=99,
        configured=racks, **changes,
    )  # fmt: skip
    views = [*of_rack, coordinator]
    return picture_of([Answer(f"tcp://rack{v.rack}:1", v, 0.1, "speaks") for v in views])


def drawn(what: Picture, width: int = 80, height: int | None = None) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(screen_of(what, width, height))
    return out.getvalue().rstrip("\n").split("\n")


def table(lines: list[str]) -> dict[str, list[str]]:
    """rack -> the other cells of its line."""
    start = next(n for n, line in enumerate(lines) if line.startswith("rack state"))
    end = lines.index("", start) if "" in lines[start:] else len(lines)
    return {line.split()[0]: line.split()[1:] for line in lines[start:end]}


def test_head_has_the_rows_of_the_data_ledger() -> None:
    rows = DataSeen(8, 4, 12, 2, "epoch 1 of 3: 2 of 8 rows done")
    text = "data: 8 rows done, 4 open, 12 left, 2 given out again; epoch 1 of 3: 2 of 8 rows done"
    assert text in drawn(picture(data=rows), 100)
    assert not any("data:" in line for line in drawn(picture()))


def test_eighty_columns_have_what_matters() -> None:
    lines = drawn(picture())
    head, about, *_ = lines
    assert head == "mend top  run7  running  2 of 2 racks training"
    assert about.startswith("the witness coordinates  P=2 H=16 tau=4 K=1  8 rounds committed")
    found = table(lines)
    assert found["rack"] == [
        "state", "step", "lag", "steps/s", "tokens/s", "behind", "stall", "out", "B/s", "in", "B/s",
    ]  # fmt: skip
    assert found["0"] == ["running", "100", "0", "10.0", "640", "0", "1.0%", "1.00M", "2.00M"]
    assert found["1"] == ["slow", "2.1x", "40", "60", "-", "-", "3", "-", "-", "-"]
    assert "1 round in flight   versions 4 4" in lines
    words = [" ".join(line.split()) for line in lines]
    assert "fragment 1 to version 5 open 0.4 s offers of 0 waiting for rack 1" in words


@pytest.mark.parametrize("width", [40, 60, 72, 80, 92, 100, 116, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    what = replace(picture(9, why=(LONG[:240],)), job="j" * 64)
    rounds = tuple(replace(each, why=LONG) for each in what.rounds)
    lines = drawn(replace(what, rounds=rounds, silent=(LONG,)), width)
    assert all(len(line) <= width for line in lines), lines
    assert sum(line.startswith("! ") for line in lines) == 2
    assert {"rack", "state"} <= set(lines[3].split())
    wide = {"ms/step": 92, "missed": 92, "tokens/s": 72, "recorded": 116, "source": 116}
    assert {n for n in wide if n in lines[3].split()} == {n for n, w in wide.items() if width >= w}


def test_reasons_are_whole_where_the_picture_may_take_more_lines() -> None:
    """In a file or a pipe nobody can make the terminal wider."""
    what = picture(why=(LONG.strip(),))
    what = replace(what, rounds=(replace(what.rounds[0], why=LONG.strip()),))
    whole, cut = " ".join(" ".join(drawn(what)).split()), " ".join(drawn(what, 80, 24))
    assert f"! {LONG.strip()}" in whole
    assert "fragment 1 to version 5" in whole
    assert whole.count("wide") == 2 * LONG.count("wide")
    assert cut.count("wide") < 4


def test_how_many_racks_the_rounds_merged_is_a_line() -> None:
    said = "9 of 10 rounds merged 1 of 2 live racks"
    assert f"of the newest: {said}" in drawn(replace(picture(), participation=said))
    assert not any("of the newest" in line for line in drawn(picture()))


def test_a_wide_terminal_shows_what_the_script_recorded() -> None:
    row = table(drawn(picture(), 130))["0"]
    assert "loss=2.346" in row
    assert row[-1] == "itself"


@pytest.mark.parametrize("height", [12, 24, 50])
@pytest.mark.parametrize("racks", [2, 12, 64])
def test_rows_beyond_the_height_are_cut_and_counted(racks: int, height: int) -> None:
    what = picture(racks)
    rounds = tuple(RoundLine(f, 5, "open", (0,), 1.0, "") for f in range(30))
    what = replace(what, rounds=rounds, in_flight=40)
    lines = drawn(what, 80, height)
    assert len(lines) <= height
    shown = sum(line.startswith("fragment") for line in lines)
    assert f"and {40 - shown} more" in lines
    left_out = [line for line in lines if line.endswith("more racks")]
    rows = len(table(lines)) - 1 - len(left_out)
    assert left_out == ([f"and {racks - rows} more racks"] if rows < racks else [])
    assert len(drawn(what, 80)) > 30 + racks, "without a height nothing is left out"


def test_table_without_answers_names_the_addresses_tried() -> None:
    silent = picture_of([Answer("tcp://10.0.0.1:21900", None, 2.0, "closed")])
    lines = drawn(silent, 120)
    assert lines[0] == "mend top  no job  nobody answers"
    assert lines[1].startswith("! tcp://10.0.0.1:21900: no connection: no process listens there")


def test_starting_and_ended() -> None:
    starting = view(
        0, state="starting", missing=(1,), racks=(rack_seen(0),), rounds=(), in_flight=0,
        versions=(), training=None, commits=0,
    )  # fmt: skip
    found = drawn(picture_of([Answer("tcp://rack0:1", starting, 0.1, "speaks")]))
    assert found[0].startswith("mend top  run7  starting")
    assert table(found)["1"][0] == "absent"
    assert "no rounds in flight" in found
    assert "! no hello yet from rack 1" in found
    ended = view(0, state="ended", over=True)
    found = drawn(picture_of([Answer("tcp://rack0:1", ended, 0.1, "closed")]))
    assert "the job has ended" in found[0]


def test_markup_in_what_others_say_is_text() -> None:
    evil = "[red]not markup[/red] [/]"
    rounds = (RoundLine(1, 5, "open", (0,), 1.0, evil),)
    recorded = {"[bold]x[/bold]": 1.0}
    what = picture()
    racks = (replace(what.racks[0], recorded=recorded), *what.racks[1:])
    text = "\n".join(drawn(replace(what, notices=(evil,), rounds=rounds, racks=racks), 200))
    assert text.count(evil) == 2
    assert "[bold]x[/bold]=1" in text
