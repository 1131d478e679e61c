"""Which settings are in force, and who said so."""

from __future__ import annotations

import pytest

from mend.config.origins import in_force
from mend.errors import ConfigError
from tests import golden


def test_nothing_is_in_force_but_defaults() -> None:
    assert in_force()[1] == ()


def test_a_wrong_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEND_RACK", "7")
    with golden.raises(ConfigError):
        in_force()
