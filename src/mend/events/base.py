"""What all kinds of events have in common: fields, a sentence, a severity and a remedy.

A process records events about itself in its events file and in the log. The tag of the struct is
the kind of the event there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

Whole = Annotated[int, Meta(ge=0, le=1 << 62)]
Number = Annotated[int, Meta(ge=-1, le=1 << 62)]
"""-1: there is none."""


class Severity(IntEnum):
    """The values are those of `logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


class LoggedEvent(Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """Names of fields end with their units. Fields with their default value are not written.

    `says` and `remedy` contain names of fields in braces, as in the events file. Kinds are
    subclasses of one of the five classes below, which set the severity.
    """

    severity: ClassVar[Severity] = Severity.INFO
    loud: ClassVar[bool] = False
    """Whether it is shown even if logging is not configured. `Loudness` suppresses some."""
    says: ClassVar[str] = ""
    """The sentence for people."""
    remedy: ClassVar[str] = ""
    """What a person should do; for warnings and errors."""

    def sentence(self) -> str:
        """The sentence, with the values of the fields."""
        return self.says.format_map(_Shown(self))

    def advice(self) -> str:
        """The remedy, with the values of the fields; empty: there is nothing to do."""
        return self.remedy.format_map(_Shown(self))

    def fields(self) -> dict[str, Any]:
        """The fields as the events file has them, without defaults."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["kind"]
        return fields


class DebugEvent(LoggedEvent, frozen=True):
    """Part of every round or step."""

    severity = Severity.DEBUG


class InfoEvent(LoggedEvent, frozen=True):
    """A usual change."""


class LoudEvent(LoggedEvent, frozen=True):
    """A change that people should see, without any need to act."""

    loud = True


class WarningEvent(LoggedEvent, frozen=True):
    """Something that a person should check."""

    severity = Severity.WARNING
    loud = True


class ErrorEvent(LoggedEvent, frozen=True):
    """Something is lost, or wrong."""

    severity = Severity.ERROR
    loud = True


Emit = Callable[[LoggedEvent], None]
"""Takes an event for the events file and the log."""


def kind_of(event: LoggedEvent | type[LoggedEvent]) -> str:
    """The tag: the kind that the events file and the log show."""
    return str(event.__struct_config__.tag)


def log_text(event: LoggedEvent) -> str:
    """The part of a log line after the process: `KIND FIELD=VALUE ... msg="..." remedy="..."`.

    Texts that the sentence repeats are left out of the fields. An event of level DEBUG has fields
    only.
    """
    fields = event.fields()
    if event.severity > Severity.DEBUG:
        words = event.sentence()
        fields = {
            name: value
            for name, value in fields.items()
            if not (isinstance(value, str) and " " in value and value in words)
        }
        fields.pop("remedy", None)
        fields["msg"] = words
        if advice := event.advice():
            fields["remedy"] = advice
    return " ".join([kind_of(event), *(f"{name}={_quoted(v)}" for name, v in fields.items())])


class _Shown(dict[str, str]):
    """The values of the fields as a sentence shows them."""

    def __init__(self, event: LoggedEvent) -> None:
        names = zip(event.__struct_fields__, event.__struct_encode_fields__, strict=True)
        super().__init__(
            (name, shown(msgspec.to_builtins(getattr(event, own)))) for own, name in names
        )


def shown(value: object) -> str:
    """A value in a line. A list of structs shows their racks."""
    match value:
        case None:
            return "unknown"
        case list() | tuple():
            return ",".join(map(shown, value)) or "-"
        case dict() if "rack" in value:
            return str(value["rack"])
        case dict():
            return ",".join(f"{name}:{shown(each)}" for name, each in value.items())
    return str(value)


def _quoted(value: object) -> str:
    text = shown(value)
    plain = text.isprintable() and not any(character in text for character in ' "')
    return text if plain else json.dumps(text, ensure_ascii=False)
