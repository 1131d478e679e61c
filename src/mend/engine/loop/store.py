"""Keeps the tensors that the machines of a rank only name, and is the only one to keep them.

What other racks may pull is served as long as it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.sums import Tensors, tensors_of
from mend.engine.io.host import HostInterface
from mend.engine.state.fragment_state import OpenOffer
from mend.engine.state.pulls import Pulls
from mend.transport.growth import Growth
from mend.types import Member, Owned, Peer, growing_key, offer_key, slice_key, state_key

OfferName = tuple[Member, int, int]
"""(member, fragment, seq)"""

AttemptKey = tuple[int, int, int]
"""(fragment, version, attempt)"""


@dataclass(frozen=True, slots=True)
class FragmentRules:
    """What this rank owns of a fragment, where the tensors lie in that, and the numerics for it."""

    owned: Owned
    tensors: Tensors
    numerics: Numerics

    @property
    def payload_bytes(self) -> int:
        return self.numerics.payload_bytes(self.owned)

    @property
    def varies(self) -> bool:
        """Whether offers differ in size, so that each must state it."""
        return self.numerics.codecs(self.owned).varies


def rules_of(
    owned: Sequence[Owned], numerics: Numerics, plain: Sequence[Sequence[bool]], moments: int
) -> list[FragmentRules]:
    """The rules of each fragment. `plain`: which of its tensors are merged by the mean whatever the
    rule; empty: none. `moments`: number of fragments of moments, the last ones."""
    of_moments, flags = numerics.of(moments=True), plain or [()] * len(owned)
    rules = [numerics] * (len(owned) - moments) + [of_moments] * moments
    return [
        FragmentRules(part, tensors_of(part, marked), rule)
        for part, marked, rule in zip(owned, flags, rules, strict=True)
    ]


@dataclass(slots=True)
class Payload:
    """Bytes of an offer, with their checksum."""

    data_B: Tensor
    checksum: str


@dataclass
class Attempt:
    """The slices of one attempt. `cuts`: where slice i begins, and where the last one ends.
    `parts`: by (rack, position), pulled slices of payloads that wait to be merged. `own`: positions
    of the slices that this rank has merged."""

    merged_N: Tensor
    cuts: list[int]
    parts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    own: list[int] = field(default_factory=list)

    def merged(self, position: int) -> Tensor:
        return self.merged_N[self.cuts[position] : self.cuts[position + 1]]


class TensorStore:
    """The tensors of one rank. Loop thread. Others look tensors up; only the methods here put or
    free one. `genesis`: the anchors to begin with."""

    def __init__(
        self,
        host: HostInterface,
        me: Peer,
        member: Member,
        rules: Sequence[FragmentRules],
        genesis: Sequence[Anchor],
    ) -> None:
        self.host, self.me, self.member, self.rules = host, me, member, rules
        self.anchors: dict[tuple[int, int], Anchor] = {}
        """By (fragment, version)."""
        self.tentative: dict[AttemptKey, Anchor] = {}
        self.payloads: dict[OfferName, Payload] = {}
        self.offers: dict[tuple[int, int], OpenOffer] = {}
        """Own offers by (fragment, seq)."""
        self.attempts: dict[AttemptKey, Attempt] = {}
        self.pulls = Pulls()
        for fragment, anchor in enumerate(genesis):
            self.anchors[fragment, anchor.version] = anchor
            host.serve(self.anchor_key(fragment, anchor), anchor.view())

    def publish(self, fragment: int, version: int, attempt: int) -> Anchor:
        """Serve and return a decided version: the tentative result of `attempt`; 0: a version that
        was copied."""
        if attempt:
            self.anchors[fragment, version] = self.tentative.pop((fragment, version, attempt))
        anchor = self.anchors[fragment, version]
        self.host.serve(self.anchor_key(fragment, anchor), anchor.view())
        return anchor

    def put_copy(self, fragment: int, anchor: Anchor) -> None:
        """Keep a decided version that was copied; `publish` serves it."""
        self.anchors[fragment, anchor.version] = anchor

    def put_tentative(self, key: AttemptKey, anchor: Anchor) -> None:
        """Keep the result of an attempt until it is published or freed."""
        self.tentative[key] = anchor

    def free_anchor(self, fragment: int, version: int, attempt: int) -> None:
        """Free the tentative result of `attempt`; 0: a published version."""
        if attempt:
            self.tentative.pop((fragment, version, attempt), None)
        elif (anchor := self.anchors.pop((fragment, version), None)) is not None:
            self.host.drop(self.anchor_key(fragment, anchor))

    def put_offer(self, own: OpenOffer) -> None:
        """Keep what was captured for an own offer until `free_offer`."""
        self.offers[own.fragment, own.seq] = own

    def put_payload(self, name: OfferName, data_B: Tensor, checksum: str) -> None:
        """Keep and serve the payload (uint8 B) of an offer."""
        self.payloads[name] = Payload(data_B, checksum)
        self.host.serve(self.offer_key(name), data_B.numpy().data)

    def free_offer(self, name: OfferName) -> None:
        """Free the payload of an offer; of an own offer, also what was captured for it."""
        member, fragment, seq = name
        self.host.drop(self.offer_key(name))
        self.payloads.pop(name, None)
        if member == self.member and (own := self.offers.pop((fragment, seq), None)) is not None:
            self.host.drop(self.growing_key(own))

    def serve_growing(self, own: OpenOffer, payload_B: Tensor) -> Growth:
        """Serve an own offer while it is encoded into `payload_B`. Any thread."""
        growth = Growth()
        self.host.serve(self.growing_key(own), payload_B.numpy().data, growth)
        return growth

    def growing_key(self, own: OpenOffer) -> bytes:
        return growing_key(self.member, self.me.rank, own.fragment, own.anchor.version)

    def attempt(self, key: AttemptKey, count: int) -> Attempt:
        """The slices of an attempt that has `count` of them; made at the first call."""
        if key not in self.attempts:
            rules = self.rules[key[0]]
            merged_N = rules.numerics.buffers.empty(rules.owned.numel, locked=False)
            self.attempts[key] = Attempt(merged_N, rules.numerics.cuts(rules.owned, count))
        return self.attempts[key]

    def put_slice(self, key: AttemptKey, position: int, attempt: Attempt) -> None:
        """Serve a slice that this rank has merged, unless its attempt was freed meanwhile."""
        out_n = attempt.merged(position)
        if self.attempts.get(key) is attempt and out_n.numel():
            self.host.serve(self.slice_key(key, position), out_n.view(torch.uint8).numpy().data)
            attempt.own.append(position)

    def free_attempt(self, key: AttemptKey) -> None:
        attempt = self.attempts.pop(key, None)
        for position in attempt.own if attempt is not None else ():
            self.host.drop(self.slice_key(key, position))

    def anchor_key(self, fragment: int, anchor: Anchor) -> bytes:
        return state_key(self.me.rank, fragment, anchor.version, anchor.digest)

    def offer_key(self, name: OfferName) -> bytes:
        return offer_key(name[0], self.me.rank, name[1], name[2])

    def slice_key(self, key: AttemptKey, position: int) -> bytes:
        return slice_key(self.me.rank, *key, position)
