"""Kinds take what people mean and nothing else, whatever they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mend.config import kinds
from mend.config.kinds import Kind

ALL = {name: kind for name, kind in vars(kinds).items() if isinstance(kind, Kind)}
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.tuples(),
    st.lists(st.text(max_size=5), max_size=3), st.dictionaries(st.text(), st.text(), max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("name", ALL)
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
@given(written=st.text())
def test_parse_reads_a_text_or_says_no(name: str, written: str) -> None:
    try:
        ALL[name].parse(written)
    except ValueError:
        return


def test_numbers_of_numpy_become_plain_ones() -> None:
    assert type(kinds.whole(0).accept(np.int64(3))) is int
    assert type(kinds.SHARE.accept(np.float32(0.5))) is float


@pytest.mark.parametrize("value", [True, "3", 3.0, None, 2, 8])
def test_a_whole_number_is_no_bool_no_text_no_float(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        kinds.whole(3, 7).accept(value)


@given(port=st.integers(-5, 70_000))
def test_ports_have_their_range(port: int) -> None:
    assert kinds.is_address(f"tcp://a:{port}") == (1 <= port <= 65_535)
    assert kinds.is_address(f"tcp://a:{port}", port_min=0) == (0 <= port <= 65_535)
