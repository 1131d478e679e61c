"""Invariants are checked whatever the interpreter's options, and say what a report needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mend.errors import InvariantError, MendError, ensure, require


def test_broken_invariant_names_the_rule_and_the_state() -> None:
    ensure(True, "never said", x=1)
    with pytest.raises(
        InvariantError, match=r"^two ends \(offer='a', seq=3\)\. This is a bug"
    ) as e:
        ensure([], "two ends", offer="a", seq=3)
    assert (e.value.broken, e.value.state) == ("two ends", {"offer": "a", "seq": 3})
    assert isinstance(e.value, MendError)
    assert isinstance(e.value, AssertionError)


def test_required_value_is_returned_unless_it_is_none() -> None:
    assert require(0, "is there") == 0
    with pytest.raises(InvariantError, match=r"^no policy\. This is a bug"):
        require(None, "no policy")


def test_invariant_is_checked_without_asserts() -> None:
    code = "from mend.consensus.log import Log; Log().cut(-1)"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "InvariantError: record 0 is decided (index=-1)" in done.stderr
