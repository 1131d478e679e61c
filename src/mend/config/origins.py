"""Reads which settings are in force here, and which source gave each."""

from __future__ import annotations

from dataclasses import dataclass

from mend.config.settings import MendConfig, kinds
from mend.config.sources import from_environment, from_toml


@dataclass(frozen=True, slots=True)
class InForce:
    """A setting that a source names."""

    field: str
    value: object
    origin: str


def in_force() -> tuple[MendConfig, tuple[InForce, ...]]:
    """`MendConfig()` as it would be here, and its settings that a source names. Raises
    ConfigError."""
    config = MendConfig()
    rules = kinds()
    named = {**from_toml(rules), **from_environment(rules)}
    return config, tuple(
        InForce(name, getattr(config, name), named[name].origin) for name in rules if name in named
    )
