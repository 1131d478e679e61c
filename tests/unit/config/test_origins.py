"""Which settings are in force, and who said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from mend.config.origins import InForce, in_force
from mend.errors import ConfigError
from tests import golden


def test_the_environment_goes_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text("racks = 3\nfragments = 2\n")
    monkeypatch.setenv("MEND_CONFIG", str(path))
    monkeypatch.setenv("MEND_RACKS", "4")
    config, named = in_force()
    assert (config.racks, config.fragments) == (4, 2)
    assert named == (
        InForce("racks", 4, "MEND_RACKS"),
        InForce("fragments", 2, f"fragments in {path}"),
    )


def test_nothing_is_in_force_but_defaults() -> None:
    assert in_force()[1] == ()


def test_a_wrong_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEND_RACK", "7")
    with golden.raises(ConfigError):
        in_force()
