"""The settings of tsugi-mend as settings of mend."""

from __future__ import annotations

from typing import Any

from mend.config import MendConfig as Settings
from mend.config.predecessor import translated


def MendConfig(**settings: Any) -> Settings:  # the name that scripts call
    """mend's configuration from the settings of tsugi-mend 0.1.5, of mend, or of both. What is not
    given has mend's default.

    A setting that mend has keeps its meaning. One that it does not have is accepted at its default,
    as mend then does what that stands for, and refused otherwise. Raises ConfigError.
    """
    return Settings(**translated(settings))
