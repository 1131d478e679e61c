"""Reads which settings are in force here, and which source gave each."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mend.config.settings import MendConfig
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
    kinds = {field.name: field.metadata["kind"] for field in fields(MendConfig)}
    named = {**from_toml(kinds), **from_environment(kinds)}
    return config, tuple(
        InForce(name, getattr(config, name), named[name].origin) for name in kinds if name in named
    )
