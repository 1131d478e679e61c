"""Every kind of event has its sentence, its remedy, and a place that emits it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from mend.events.base import LoggedEvent, Severity, kind_of, log_text
from mend.events.kinds import RackSlow, RackSlowCause, ResumeLost, RosterChanged, StateFresh
from mend.events.lines import KINDS, TimedEvent, decode_line, encode_line
from tests.events_table import PAGES, with_tables
from tests.noted import kinds_made_in

SOURCE = Path(__file__).parent.parent.parent.parent / "src" / "mend"
DOCS = SOURCE.parent.parent / "docs"
kinds = pytest.mark.parametrize("made", KINDS.values(), ids=kind_of)


def example(made: type[LoggedEvent]) -> LoggedEvent:
    """One with a value in every field."""
    info = {field.name: field.type for field in msgspec.structs.fields(made)}
    return made(**{name: value_of(each) for name, each in info.items()})


def value_of(kind: Any) -> Any:
    while hasattr(kind, "__metadata__"):
        kind = kind.__origin__
    if kind in (int, float, bool, str):
        return {int: 3, float: 0.5, bool: True, str: "some words"}[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{f.name: value_of(f.type) for f in msgspec.structs.fields(kind)})
    args = get_args(kind)
    if get_origin(kind) is tuple:
        return (value_of(args[0]), value_of(args[0]))
    if get_origin(kind) is dict:
        return {"1": value_of(args[1])}
    return value_of(args[0]) if not isinstance(args[0], str) else args[0]


@kinds
def test_line_of_every_kind_comes_back_as_it_was(made: type[LoggedEvent]) -> None:
    timed = TimedEvent(1 << 60, example(made))
    line = encode_line(timed)
    assert line.startswith(b'{"kind":"%s","time_ns":1152921504606846976' % kind_of(made).encode())
    assert line.endswith(b"}\n")
    assert decode_line(line) == timed


@kinds
def test_every_kind_has_a_sentence_of_its_fields(made: type[LoggedEvent]) -> None:
    event = example(made)
    assert made.says
    assert event.sentence()
    assert "{" not in event.sentence()
    named = set(re.findall(r"\{(\w+)\}", made.says + made.remedy))
    assert named <= set(made.__struct_encode_fields__)


@kinds
def test_warning_or_error_is_loud_and_has_a_remedy(made: type[LoggedEvent]) -> None:
    event = example(made)
    assert made.loud or made.severity < Severity.WARNING
    assert bool(event.advice()) == (made.severity >= Severity.WARNING)
    line = log_text(event)
    assert line.startswith(kind_of(made) + " ")
    assert line.isprintable()


@kinds
def test_remedy_names_a_page_and_heading_that_exist(made: type[LoggedEvent]) -> None:
    for page, heading in re.findall(r"docs/(\w+\.md)(?:, ([^;:{]+))?", made.remedy):
        text = (DOCS / page).read_text(encoding="utf-8")
        assert (
            not heading
            or re.search(rf"^#+ {re.escape(heading)}\??$", text, re.MULTILINE)
            or (heading in text)
        ), (page, heading)


def test_every_kind_is_emitted_somewhere() -> None:
    paths = [path for path in SOURCE.rglob("*.py") if "events" not in path.parent.name]
    found = {kind for path in paths for kind in kinds_made_in(path)}
    assert found == KINDS.keys(), KINDS.keys() - found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_page_of_events_has_the_kinds_of_the_code(page: Path) -> None:
    assert with_tables(page) == page.read_text(encoding="utf-8"), (
        "run: python -m tests.events_table"
    )


def test_sentences_leave_out_what_is_not_known() -> None:
    peers = RackSlow(slow_rack=1, against="peers", step=40, ratio=2.0)
    assert peers.sentence() == (
        "rack 1 is slow: 2.0x the time per token of the median of the other racks; found at step 40"
    )
    cause = RackSlowCause(slow_rack=1, slow_rank=3, cause="link", link_to=2, ratio=2.0)
    assert cause.sentence() == "rack 1 rank 3 is slow by its link to rack 2"
    assert StateFresh(name="optimizer", reason="no donor").sentence() == (
        "optimizer begins fresh: no donor"
    )
    assert "has no part of the checkpoint" in ResumeLost(1, None).sentence()
    assert "the job has 2 racks now" in ResumeLost(2, 640, 2).sentence()


def test_roster_without_racks_says_that_none_is_left() -> None:
    assert RosterChanged((), (), "all racks are done").sentence() == (
        "no rack is left: all racks are done"
    )
