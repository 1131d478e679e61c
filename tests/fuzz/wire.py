"""Frames: whatever the bytes are, `decode` gives a message or a WireError, in little room."""

from __future__ import annotations

import io
import random
import re
import tracemalloc

import msgspec
from msgspec import inspect
from rich.console import Console

from mend.coordination import wire
from mend.coordination.messages import Envelope
from mend.errors import WireError
from mend.following.log_view import LogView
from mend.following.puzzle import Puzzle
from mend.status import messages as status_messages
from mend.status.follow_messages import (
    ANSWER_BYTES_MAX,
    Follow,
    Followed,
    Parts,
    decode_asked,
    decode_followed,
    decode_parts,
)
from mend.tools.top.picture import Answer, picture_of
from mend.tools.top.table import screen_of
from tests.fuzz.harness import Target
from tests.fuzz.jobs import frames_heard
from tests.fuzz.mutate import TOKENS, mutated
from tests.fuzz.shapes import MESSAGES, frame_of, tree_of, value_of

OF_EACH = 40
"""Frames of every type in the corpus."""

HEAD_BYTES = len(wire.framed(b""))

MEASURED_ONE_IN = 997
"""So often the peak of memory is looked at."""

PEAK_BYTES_MAX, PEAK_PER_BYTE_MAX = 1 << 20, 64
"""What decoding may take at its peak: this, and so much for every byte of the frame."""

_CLASSES = (
    ("wire version", "another version"), ("do not begin", "not a frame"),
    ("bits changed", "damaged on the way"), ("the limit is", "longer than a frame"),
    ("length", "a length beyond its limit"), ("truncated", "ends too early"),
    ("trailing", "goes on behind its end"), ("utf-8", "a text that is no UTF-8"),
    ("codec can't decode", "a text that is no UTF-8"), ("recursion", "nested too deep"),
    ("matching regex", "a text of another form"),
    (r"`(int|float)` [<>]", "a number beyond its limit"),
    ("out of range", "a number beyond its limit"), ("Invalid value", "an unknown kind of message"),
    ("Expected", "another type"), ("", "malformed"),
)  # fmt: skip


def class_of(error: WireError) -> str:
    text = str(error)
    return next(name for sign, name in _CLASSES if re.search(sign, text, re.IGNORECASE))


class Wire(Target):
    """Whole messages at their limits, wild ones, damaged ones, and bytes that never were one."""

    name, inputs = "wire", 1_000_000

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"corpus {seed}")
        made = [frame_of(tree_of(rng, kind)) for kind in MESSAGES for _ in range(OF_EACH)]
        self.corpus = made + frames_heard()
        self._seen = 0

    def example(self, rng: random.Random) -> bytes:
        draw = rng.random()
        if draw < 0.25:
            return frame_of(tree_of(rng))
        if draw < 0.5:
            return frame_of(tree_of(rng, wild=rng.choice((0.01, 0.1))))
        if draw < 0.98:
            one, other = rng.choice(self.corpus), rng.choice(self.corpus)
            if rng.random() < 0.9:  # a damaged message in a frame that is whole
                return wire.framed(mutated(rng, one[HEAD_BYTES:], other[HEAD_BYTES:], 0))
            return mutated(rng, one, other, 0)
        return rng.choice(
            (
                rng.randbytes(rng.randrange(200)),
                wire.framed(rng.randbytes(rng.randrange(200))),
                wire.framed(rng.choice(TOKENS) * rng.choice((1, 3, 1000))),
                wire.framed(
                    rng.choice((b"\x91", b"\x81\xa1a", b"\x95")) * rng.choice((10, 1000, 100_000))
                ),
                b"",
            )
        )

    def take(self, data: bytes) -> str:
        self._seen += 1
        measured = self._seen % MEASURED_ONE_IN == 0
        if measured:
            tracemalloc.start()
        try:
            return self._decoded(data)
        finally:
            if measured:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                most = PEAK_BYTES_MAX + PEAK_PER_BYTE_MAX * len(data)
                assert peak <= most, f"{peak} bytes for a frame of {len(data)}"

    @staticmethod
    def _decoded(data: bytes) -> str:
        try:
            envelope = wire.decode(data)
        except WireError as error:
            return class_of(error)
        assert type(envelope) is Envelope, envelope
        assert type(envelope.body) in MESSAGES, envelope.body
        assert wire.decode(wire.encode(envelope)) == envelope, "it does not come back as it was"
        return "accepted"


LONGEST = {
    status_messages.Look: status_messages.LOOK_BYTES_MAX,
    Follow: status_messages.LOOK_BYTES_MAX,
    status_messages.JobStatus: status_messages.VIEW_BYTES_MAX,
    Followed: ANSWER_BYTES_MAX,
    Parts: ANSWER_BYTES_MAX,
}


def _parts_in(frame: bytes) -> Parts:
    """They come as a payload, whose own digest has found damage before."""
    return decode_parts(wire.body_of(frame, status_messages.HEAD, ANSWER_BYTES_MAX))


class Looks(Target):
    """What observers and followers say and hear, whole, wild and damaged. The first byte says who
    reads it."""

    name, inputs = "looks", 50_000

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"looks {seed}")
        self.corpus = [self._frame(rng, kind) for kind in self._kinds for _ in range(OF_EACH)]

    _kinds = (status_messages.Look, status_messages.JobStatus, Follow, Followed, Parts)
    _readers = (decode_asked, status_messages.decode_view, decode_asked, decode_followed, _parts_in)

    def _frame(self, rng: random.Random, kind: type, wild: float = 0.0) -> bytes:
        tree = value_of(rng, inspect.type_info(kind), wild)
        return wire.framed(msgspec.msgpack.encode(tree), status_messages.HEAD)

    def example(self, rng: random.Random) -> bytes:
        which = rng.randrange(len(self._kinds))
        draw = rng.random()
        if draw < 0.5:
            frame = self._frame(rng, self._kinds[which], rng.choice((0.0, 0.0, 0.01, 0.1)))
        else:
            one, other = rng.choice(self.corpus), rng.choice(self.corpus)
            if draw < 0.95:  # a damaged word in a frame that is whole
                body = mutated(rng, one[HEAD_BYTES:], other[HEAD_BYTES:], 0)
                frame = wire.framed(body, status_messages.HEAD)
            else:
                frame = mutated(rng, one, other, 0)
        return bytes([which]) + frame

    def take(self, data: bytes) -> str:
        which, frame = data[0] % len(self._kinds) if data else 0, data[1:]
        try:
            word: object = self._readers[which](frame)
            if isinstance(word, Followed):
                LogView().take(word)
            elif isinstance(word, Parts):
                Puzzle([word])
        except WireError as error:
            return class_of(error)
        asked = (status_messages.Look, Follow)
        assert type(word) is self._kinds[which] or {type(word), self._kinds[which]} == {*asked}
        assert len(frame) <= LONGEST[self._kinds[which]]
        if isinstance(word, status_messages.JobStatus):
            picture = picture_of([Answer("tcp://there:1", word, 0.0, "speaks")])
            if frame[-1] % 8 == 0:  # drawing costs a hundred times as much as all the rest
                console = Console(file=io.StringIO(), width=80)
                console.print(screen_of(picture, 80, 24))
        return "accepted"
