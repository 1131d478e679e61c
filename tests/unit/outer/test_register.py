"""What cannot be registered is refused with the remedy, when it is registered."""

from __future__ import annotations

import re

import pytest

from mend.errors import ConfigError
from mend.outer import OUTERS, Nesterov, register


class OneString(Nesterov):
    name = "one-string"
    states = "first"  # the comma is missing


class NoArguments(Nesterov):
    name = "no-arguments"

    def __init__(self) -> None:
        super().__init__(1.0, 0.0)


class Fails(Nesterov):
    name = "fails"

    def __init__(self, lr: float, momentum: float, ramp: int) -> None:
        raise TypeError("of its own")


def test_a_string_is_no_tuple_of_states() -> None:
    said = "outer='one-string': has states 'first', which is a string. Write a tuple: ('first',)."
    with pytest.raises(ConfigError, match=re.escape(said)):
        register("one-string", OneString)
    assert "one-string" not in OUTERS


@pytest.mark.parametrize("make", [NoArguments, OneString(1.0, 0.0)])
def test_rule_without_three_arguments_is_refused_with_their_names(make: object) -> None:
    said = r"outer='no-arguments': .*make is called with \(lr, momentum, ramp\)"
    with pytest.raises(ConfigError, match=said):
        register("no-arguments", make)
    assert "no-arguments" not in OUTERS


def test_error_raised_by_a_rule_is_not_changed() -> None:
    with pytest.raises(TypeError, match="of its own"):
        register("fails", Fails)
