"""The settings of tsugi-mend as settings of mend."""

from __future__ import annotations

from typing import Any

from mend.config import MendConfig as Settings
from mend.config.predecessor import translated


def MendConfig(**settings: Any) -> Settings:  # the name that scripts call
    """The configuration of mend from settings of tsugi-mend 0.1.5, of mend, or of both.

    Settings that are not given have mend's defaults. A setting that mend has keeps its meaning. One
    that mend does not have is accepted with its default, which stands for what mend does, and
    refused otherwise. Raises ConfigError.
    """
    return Settings(**translated(settings))
