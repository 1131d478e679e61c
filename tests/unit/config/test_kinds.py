"""Kinds take what people mean and nothing else, whatever they are given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mend.config import kinds
from mend.config.kinds import Kind
from mend.types import RACKS_MAX

ALL = {name: kind for name, kind in vars(kinds).items() if isinstance(kind, Kind)}
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.tuples(),
    st.lists(st.text(max_size=5), max_size=3), st.dictionaries(st.text(), st.text(), max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40)
@given(value=ANYTHING)
def test_accept_stores_a_value_or_says_no(name: str, value: Any) -> None:
    """No third way: another exception would be a crash. What is stored is taken again."""
    try:
        stored = ALL[name].accept(value)
    except (ValueError, TypeError, OverflowError):
        return
    assert ALL[name].accept(stored) == stored
    hash(stored)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40)
@given(written=st.text())
def test_parse_reads_a_text_or_says_no(name: str, written: str) -> None:
    try:
        ALL[name].parse(written)
    except ValueError:
        return


def test_numbers_of_numpy_become_plain_ones() -> None:
    assert type(kinds.whole(0).accept(np.int64(3))) is int
    assert type(kinds.SHARE.accept(np.float32(0.5))) is float


@given(port=st.integers(-5, 70_000))
def test_ports_have_their_range(port: int) -> None:
    assert kinds.is_address(f"tcp://a:{port}") == (1 <= port <= 65_535)
    assert kinds.is_address(f"tcp://a:{port}", port_min=0) == (0 <= port <= 65_535)


REFUSED: list[tuple[Kind, Any]] = [
    (kinds.whole(0), True), (kinds.whole(0), -1), (kinds.whole(0, 7), 8),
    (kinds.number("any", lambda value: True), math.inf),
    (kinds.number("any", lambda value: True), math.nan),
    (kinds.number("any", lambda value: True), False),
    (kinds.number("any", lambda value: True), "1"),
    (kinds.number("below 1", lambda value: value < 1), 1), (kinds.seconds(0.5), 0.4),
    (kinds.seconds(), 86_401), (kinds.text("any", lambda value: True), 5),
    (kinds.text("none", lambda value: False), "a"), (kinds.one_of("a", "b"), "c"),
    (kinds.either(kinds.whole(1), "none", None), 0), (kinds.SHARE, 1.01),
    (kinds.MILLISECONDS, 600_001), (kinds.OUTER_LR, 0), (kinds.OUTER_LR, 101), (kinds.MOMENTUM, 1),
    (kinds.MOMENTUM, 1 - 1e-12), (kinds.MOMENTUM, -0.1), (kinds.POSITIVE, 0),
    (kinds.PEERS, "0=tcp://a:1,0=tcp://b:1"), (kinds.PEERS, "0=tcp://a:1,tcp://b:1"),
    (kinds.PEERS, f"{RACKS_MAX}=tcp://a:1"), (kinds.PEERS, "-1=tcp://a:1"), (kinds.PORTS, "0-1"),
    (kinds.PORTS, "2-1"), (kinds.PORTS, "1-65536"), (kinds.NAMES, "a,a"), (kinds.NAMES, ("a", "")),
    (kinds.RACK_NUMBERS, "1,1"), (kinds.SIZES, "2,0"), (kinds.SIZES, (1025,)),
    (kinds.ADDRESS, "tcp://a:0"), (kinds.HOST, "a b"), (kinds.YES_NO, 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), REFUSED)
def test_value_beyond_its_rule_is_refused(kind: Kind, value: Any) -> None:
    with pytest.raises(ValueError):
        kind.accept(value)


TAKEN: list[tuple[Kind, Any, Any]] = [
    (kinds.whole(0, 7), 0, 0), (kinds.whole(0, 7), 7, 7), (kinds.seconds(0.5), 0.5, 0.5),
    (kinds.seconds(), 86_400, 86_400.0), (kinds.one_of("a", "b"), "b", "b"),
    (kinds.either(kinds.whole(1), "none", None), None, None),
    (kinds.either(kinds.whole(1), "none", None), 1, 1), (kinds.SHARE, 0, 0.0),
    (kinds.SHARE, 1, 1.0), (kinds.MILLISECONDS, 600_000, 600_000.0), (kinds.OUTER_LR, 100, 100.0),
    (kinds.MOMENTUM, 0, 0.0),
    (kinds.PEERS, {1: "tcp://b:1", 0: "tcp://a:1"}, ("0=tcp://a:1", "1=tcp://b:1")),
    (kinds.PEERS, f"{RACKS_MAX - 1}=tcp://a:1", (f"{RACKS_MAX - 1}=tcp://a:1",)),
    (kinds.PEERS, "", ()), (kinds.PORTS, "1-65535", "1-65535"), (kinds.PORTS, "7-7", "7-7"),
    (kinds.PORTS, "", ""), (kinds.NAMES, " a, ,b", ("a", "b")),
    (kinds.RACK_NUMBERS, "2, 1", (1, 2)), (kinds.SIZES, "2, 1", (2, 1)),
    (kinds.BIND, "tcp://a:0", "tcp://a:0"), (kinds.HOST, "", ""), (kinds.FOLDER, "", None),
    (kinds.FILE, "a", Path("a")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "stored"), TAKEN)
def test_value_at_the_edge_of_its_rule_is_taken(kind: Kind, value: Any, stored: Any) -> None:
    assert kind.accept(value) == stored


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (kinds.either(kinds.whole(1), "none", None), "NONE", None),
        (kinds.either(kinds.whole(1), "none", None), "4", 4), (kinds.FOLDER, "None", None),
        (kinds.FILE, "none", None), (kinds.FOLDER, "nonesuch", "nonesuch"),
        (kinds.YES_NO, "On", True), (kinds.NAMES, "a, b", ["a", "b"]),
    ],
)  # fmt: skip
def test_text_of_the_environment_is_parsed(kind: Kind, written: str, value: object) -> None:
    """`None` in capitals made a folder of that name."""
    assert kind.parse(written) == value


def test_rule_in_words_has_the_limits() -> None:
    assert kinds.whole(2).rule == "a whole number, at least 2"
    assert kinds.whole(2, 3).rule == "a whole number, 2 to 3"
    assert kinds.seconds(0.5).rule == "a number, 0.5 to 86400 (seconds)"
    assert kinds.either(kinds.whole(2), "adaptive", "adaptive").rule.endswith(", or adaptive")
