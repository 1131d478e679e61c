"""What the table of settings (`MendConfig`) declares for each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mend.config.kinds import Kind
from mend.types import visible


class Group(Enum):
    """The purpose of a field. The value is the heading in docs/configuration.md."""

    PEOPLE = "Settings that people set"
    TUNING = "Settings for tuning"
    EXPERIMENT = "Settings for experiments"


class Scope(Enum):
    """Where a setting must be equal. The value is the word in docs/configuration.md."""

    RACK = "rack"
    """Nowhere: each rack has its own."""
    JOB = "job"
    """On all racks of a job. A job that resumes a checkpoint may have another value."""
    PLAN = "plan"
    """On all racks of a job, and in every job that resumes its checkpoints."""


@dataclass(frozen=True, slots=True)
class Declared:
    """`in_force`: the attribute of the configuration that has the value in force, if a setting that
    is not given follows from others. Racks compare that value. Empty: the field itself."""

    kind: Kind
    meaning: str
    group: Group
    scope: Scope
    in_force: str = ""


def setting(
    group: Group, default: Any, kind: Kind, meaning: str, scope: Scope, in_force: str = ""
) -> Any:
    """A field of `MendConfig`."""
    declared = Declared(kind, meaning, group, scope, in_force)
    return field(default=default, metadata={Declared.__name__: declared})


def text_of(value: object) -> str:
    """A value for people and for comparison: never blank, unequal values have unequal texts, and 1
    is 1.0."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "empty"
    return visible(str(value))
