"""Sends repeated states as patches: the changes since a state that the receiver has.

A state is repeated with every heartbeat, and is large: an open offer has a checksum per rank.
Machines send and receive whole states. Between two processes a state travels as a `Patch` of an
earlier one that the receiver has confirmed. Whatever is lost, duplicated or reordered, a patch is
applied only to the state that it was made from. If that state is missing, the receiver confirms
nothing and the next state comes whole.

States of one kind from one process to another are a stream, numbered from 1. Every envelope in the
other direction carries the number that was read last (`Ack`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import asdict, astuple

from mend.consensus.records import Absentees, Offer
from mend.coordination.messages import (
    Ack,
    Envelope,
    Held,
    MergeProposal,
    Message,
    OfAttempt,
    OfferId,
    Orders,
    Patch,
    RankOrders,
    RankReport,
    Report,
    SliceCounts,
)
from mend.errors import WireError
from mend.types import Member, Peer

STATES_MAX = 16
"""States of a stream that either side keeps, because the next patch may be based on any of them."""

LIVES_MAX = 2
"""Incarnations of a process that are heard at the same time: frames of a former one may still
arrive."""

PEERS_MAX = 4096
"""Processes whose streams are kept: more than can talk to one process of a job."""

ENCODED_MAX = 64
"""Encoded patch fields that a sender keeps, so that a value for many receivers in the same state is
encoded once."""

_Place = Annotated[int, Meta(ge=0)]
_MANY = Meta(max_length=65536)


class _MergeProposal(OfAttempt, frozen=True, array_like=True):
    """A `MergeProposal` in a patch: members that are open offers of the same state are given by
    index."""

    members: Annotated[tuple[_Place | Offer, ...], Meta(max_length=64)]
    absent: Absentees
    sharded: bool = False
    merged: SliceCounts = ()


_ITEMS: dict[str, Any] = {
    "offers": Annotated[tuple[_Place | Offer, ...], _MANY],
    "proposals": Annotated[tuple[_Place | _MergeProposal, ...], _MANY],
    "got": Annotated[tuple[_Place | OfferId, ...], _MANY],
    "held": Annotated[tuple[_Place | Held, ...], _MANY],
}
"""Fields whose items outlive a state. In a patch, an item that the base state has is given by its
index there."""

_encode = msgspec.msgpack.Encoder().encode


class Unread(WireError):
    """A patch of a state that this process does not have, as after a restart. The next state comes
    whole."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    decoder: msgspec.msgpack.Decoder[Any]
    items: bool


def _tag(kind: type[Struct]) -> int:
    tag: int = kind.__struct_config__.tag  # type: ignore[assignment]  # as all messages say
    return tag


Repeated = Report | Orders | RankReport | RankOrders
_KINDS: dict[int, type[Repeated]] = {
    _tag(kind): kind for kind in (Report, Orders, RankReport, RankOrders)
}
_FIELDS = {
    kind: tuple(
        _Field(f.name, msgspec.msgpack.Decoder(_ITEMS.get(f.name, f.type)), f.name in _ITEMS)
        for f in msgspec.structs.fields(kind)
    )
    for kind in _KINDS.values()
}
_OFFERS: dict[type[Repeated], int] = {
    kind: kind.__struct_fields__.index("offers") for kind in (Orders, RankOrders)
}


@dataclass(slots=True)
class Encodings:
    """Encoded item lists, cached by the identity of their values, so that a state for many readers
    is encoded once."""

    _made: dict[tuple[int, ...], tuple[tuple[Any, ...], Raw]] = field(default_factory=dict)

    def of(self, old: tuple[Any, ...], new: tuple[Any, ...], offers: tuple[Offer, ...]) -> Raw:
        """Encode `new` for a reader that has `old`. `offers`: those of the same state as `new`."""
        values = (old, new, offers)
        key = (id(old), id(new), id(offers))  # the entry keeps them alive
        if (known := self._made.get(key)) is not None:
            return known[1]
        made = Raw(_encode(_refer(old, new, offers)))
        self._made[key] = (values, made)
        while len(self._made) > ENCODED_MAX:
            del self._made[next(iter(self._made))]
        return made


def make_patch(
    base_number: int, base: Repeated, state: Repeated, encodings: Encodings | None = None
) -> Patch:
    """The patch that turns `base` into `state`, a state of the same kind."""
    fields, encodings = {}, encodings or Encodings()
    offers = state.offers if isinstance(state, Orders | RankOrders) else ()
    each_field = zip(_FIELDS[type(state)], astuple(base), astuple(state), strict=True)
    for place, (each, old, new) in enumerate(each_field):
        if old is not new and old != new:
            made = encodings.of(old, new, offers) if each.items else Raw(_encode(new))
            fields[place] = made
    return Patch(_tag(type(state)), base_number, fields)


def _refer(old: tuple[Any, ...], new: tuple[Any, ...], offers: tuple[Offer, ...]) -> list[Any]:
    """The items of `new`; one that `old` contains is replaced by its index there."""
    same = {id(item): place for place, item in enumerate(old)}
    equal: dict[Any, int] | None = None
    items = []
    for item in new:
        place = same.get(id(item))
        if place is None:
            if equal is None:
                equal = {each: at for at, each in enumerate(old)}
            place = equal.get(item)
        if place is None and isinstance(item, MergeProposal):
            item = _with_places(item, offers)
        items.append(item if place is None else place)
    return items


def _with_places(proposal: MergeProposal, offers: tuple[Offer, ...]) -> _MergeProposal:
    """Replace members by indices: most are open offers, which are large, with a checksum per
    rank."""
    places = {id(offer): place for place, offer in enumerate(offers)}
    members = tuple(places.get(id(offer), offer) for offer in proposal.members)
    return _MergeProposal(**asdict(proposal) | {"members": members})


def _with_offers(proposal: _MergeProposal, offers: tuple[Offer, ...]) -> MergeProposal:
    members = tuple(offers[item] if isinstance(item, int) else item for item in proposal.members)
    return MergeProposal(**asdict(proposal) | {"members": members})


def apply_patch(base: Repeated, patch: Patch) -> Repeated:
    """Apply a patch. Raises WireError for one that does not fit this state or gives no valid
    one."""
    kind = type(base)
    known, values = _FIELDS[kind], list[Any](astuple(base))
    try:
        for place in sorted(patch.fields):  # offers come before the proposals that name them
            value = known[place].decoder.decode(patch.fields[place])
            if known[place].items:
                value = tuple(
                    values[place][item] if isinstance(item, int) else item for item in value
                )
            if known[place].name == "proposals":
                offers = values[_OFFERS[kind]]
                value = tuple(
                    _with_offers(item, offers) if isinstance(item, _MergeProposal) else item
                    for item in value
                )
            values[place] = value
    except (msgspec.DecodeError, ValueError, IndexError, RecursionError) as error:
        raise WireError(f"not a patch of a {kind.__name__}: {error}") from error
    return kind(*values)


@dataclass(slots=True)
class _Sent:
    """The sender's side of a stream."""

    number: int = 0
    states: dict[int, Repeated] = field(default_factory=dict)
    acked: int = 0

    def next(self, state: Repeated, encodings: Encodings) -> Repeated | Patch:
        self.number += 1
        answers = self.number - self.acked < STATES_MAX  # if not, the receiver may have restarted
        base = self.states.get(self.acked) if answers else None
        self.states = {n: s for n, s in self.states.items() if n >= self.acked}
        self.states[self.number] = state
        _shorten(self.states, self.acked)
        return state if base is None else make_patch(self.acked, base, state, encodings)

    def hears(self, number: int) -> None:
        """Take an ack, which may be late; 0: the receiver has no state any more."""
        if number == 0 or number > self.acked:
            self.acked = number


@dataclass(slots=True)
class _Read:
    """The receiver's side of a stream."""

    newest: int = 0
    states: dict[int, Repeated] = field(default_factory=dict)

    def take(self, number: int, body: Repeated | Patch) -> Repeated:
        """Take a state or a patch. Raises WireError for a patch of a state that is missing here."""
        if isinstance(body, Patch):
            base = self.states.get(body.base)
            if base is None:
                self.newest, self.states = 0, {}
                raise Unread(f"a patch of state {body.base}, which this process does not have")
            self.states = {n: s for n, s in self.states.items() if n >= body.base}
            body = apply_patch(base, body)
        self.states[number] = body
        self.newest = max(self.newest, number)
        _shorten(self.states, min(self.states))
        return body


def _shorten(states: dict[int, Repeated], kept: int) -> None:
    """Drop the oldest states, but never `kept`."""
    while len(states) > STATES_MAX:
        del states[min(number for number in states if number != kept)]


@dataclass
class Streams:
    """All streams of one process. While nothing is confirmed, states are sent whole."""

    member: Member
    _sent: dict[Peer, dict[int, _Sent]] = field(default_factory=dict)
    _lives: dict[Peer, int] = field(default_factory=dict)
    """The incarnation that acks are for: the first one heard, then any that has heard this process.
    So forged frames in another process's name cannot take its place with a greater number."""
    _read: dict[Peer, dict[int, dict[int, _Read]]] = field(default_factory=dict)
    """By peer, incarnation and kind; only of peers that have heard this process."""
    _encodings: Encodings = field(default_factory=Encodings)

    def envelope(self, job: str, me: Peer, to: Peer, body: Message) -> Envelope:
        """The envelope around `body`, or around its changes. The last message of a process goes
        whole, because no next one follows if its patch cannot be read."""
        life = self._lives.get(to, 0)
        read = self._read.get(to, {}).get(life, {})
        acks = tuple(Ack(kind, each.newest) for kind, each in read.items())
        kind, number = _tag(type(body)), 0
        content: Message | Patch = body
        if isinstance(body, Repeated) and not (isinstance(body, Report) and body.gone):
            stream = self._sent.setdefault(to, {}).setdefault(kind, _Sent())
            content, number = stream.next(body, self._encodings), stream.number
        return Envelope(job, *me, self.member.incarnation, content, number, life, acks)

    def read(self, envelope: Envelope) -> Message:
        """The whole body. Raises WireError if it cannot be restored."""
        peer, life = Peer(envelope.rack, envelope.rank), envelope.incarnation
        hears = envelope.acked == self.member.incarnation
        if peer not in self._lives or (hears and self._lives[peer] != life):
            self._meet(peer, life)
        if hears:
            for ack in envelope.acks:
                if (sent := self._sent.get(peer, {}).get(ack.kind)) is not None:
                    sent.hears(ack.number)
        body = envelope.body
        if envelope.number == 0 and not isinstance(body, Patch):
            return body
        kind = body.kind if isinstance(body, Patch) else _tag(type(body))
        if kind not in _KINDS or not isinstance(body, Patch | Repeated):
            raise WireError(f"a numbered message of kind {kind}, which is not a state")
        lives = self._read.get(peer, {})
        if not hears and life not in lives:
            if isinstance(body, Patch):
                raise Unread("a patch from a process that has not heard this one yet")
            return body
        streams = self._read.setdefault(peer, {}).setdefault(life, {})
        while len(self._read[peer]) > LIVES_MAX:
            del self._read[peer][next(iter(self._read[peer]))]
        return streams.setdefault(kind, _Read()).take(envelope.number, body)

    def _meet(self, peer: Peer, life: int) -> None:
        """Switch to a new incarnation of a process, which has read nothing that was sent to the
        former one."""
        self._lives[peer] = life
        for stream in self._sent.get(peer, {}).values():
            stream.acked = 0
        while len(self._lives) > PEERS_MAX:
            oldest = next(iter(self._lives))
            del self._lives[oldest]
            self._read.pop(oldest, None)
