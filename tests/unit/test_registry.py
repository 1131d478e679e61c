"""The table of names: reading an unknown one, and trying out one that is to be registered."""

from __future__ import annotations

import re

import pytest

from mend.codec import codec_named
from mend.codec import register as register_codec
from mend.errors import ConfigError
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.registry import Registry


def test_unknown_name_is_an_error_that_names_it_and_the_registered_ones() -> None:
    text = (
        "merge='median': needs one of mean, rda (the names registered in this process). Choose one "
        "of these, or import what calls mend.merge.register('median', ...) before MendConfig is "
        "built."
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        MERGES["median"]()
    with pytest.raises(ConfigError, match="outer='adam': needs one of nesterov"):
        OUTERS["adam"]
    with pytest.raises(ConfigError, match="codec='int3': needs one of float32"):
        codec_named("int3")
    assert "median" not in MERGES
    assert MERGES.get("median") is None


def test_codec_that_needs_arguments_is_refused_when_it_is_registered() -> None:
    with pytest.raises(ConfigError, match=r"codec='mine': .*make is called without arguments"):
        register_codec("mine", lambda bits: None)  # type: ignore[arg-type, misc]


def test_make_without_a_signature_is_tried() -> None:
    """`type` is written in C and takes more than one number of arguments: inspect knows none."""
    with pytest.raises(ConfigError, match="makes a type, which has no name"):
        Registry("merge", {}, of=3).tried("mine", type)
