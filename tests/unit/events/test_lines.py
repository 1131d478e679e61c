"""A reader of an events file takes hostile lines as typed errors, and nothing else."""

from __future__ import annotations

import json

import pytest

from mend.errors import EventError
from mend.events.kinds import EventsCut, RackSilent, ResumeLost
from mend.events.lines import TimedEvent, decode_line, encode_line

LINE = encode_line(TimedEvent(5, RackSilent(1, "rounds go on without it")))


def refused(line: bytes) -> EventError:
    with pytest.raises(EventError) as raised:
        decode_line(line)
    return raised.value


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\n", b"null\n", b"[]\n", b"{}\n", b"\xff\xfe\n", b'{"kind":"rack-silent"}\n',
        b'{"kind":"rack-silent","time_ns":-1}\n', b'{"kind":"rack-silent","time_ns":"now"}\n',
        b'{"kind":7,"time_ns":1}\n', b'{"kind":"rack-silent","time_ns":1e300}\n',
        b'{"kind":"rack-silent","time_ns":99999999999999999999999}\n', b"[" * 100_000,
        b'{"kind":' * 50_000, LINE[:-2], LINE[:20], LINE + LINE,
    ],
)  # fmt: skip
def test_line_that_is_no_event_is_refused(line: bytes) -> None:
    assert str(refused(line)).startswith("not an event: ")


def test_kind_of_a_newer_version_is_named_and_not_known() -> None:
    error = refused(b'{"kind":"moon-phase","time_ns":1,"phase":[1,{"a":2}]}\n')
    assert str(error) == "the kind 'moon-phase' is not known"
    assert len(str(refused(b'{"kind":"%s","time_ns":1}' % (b"x" * 100_000)))) <= 110


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"peer": 1}, {"peer": -1, "effect": ""}, {"peer": "1", "effect": ""},
        {"peer": 1.5, "effect": ""}, {"peer": 1 << 63, "effect": ""}, {"peer": 1, "effect": None},
        {"peer": [1], "effect": {}},
    ],
)  # fmt: skip
def test_known_kind_with_other_fields_is_refused(fields: dict[str, object]) -> None:
    error = refused(json.dumps({"kind": "rack-silent", "time_ns": 1, **fields}).encode())
    assert str(error).startswith("rack-silent: ")


def test_more_fields_of_a_newer_version_are_left_out() -> None:
    line = b'{"kind":"rack-silent","time_ns":1,"peer":2,"effect":"x","since_ms":7,"remedy":"y"}\n'
    assert decode_line(line) == TimedEvent(1, RackSilent(2, "x"))


def test_field_that_may_be_unknown_is_null() -> None:
    line = encode_line(TimedEvent(1, ResumeLost(1, None)))
    assert line == b'{"kind":"resume-lost","time_ns":1,"lost":1,"open_tokens":null}\n'


def test_text_that_no_json_can_hold_is_escaped() -> None:
    """A folder whose name is not UTF-8 must not end the thread that writes the file."""
    line = encode_line(TimedEvent(1, EventsCut("/tmp/\udcff")))
    assert json.loads(line)["path"] == "/tmp/\udcff"
    assert line.endswith(b"\n")
