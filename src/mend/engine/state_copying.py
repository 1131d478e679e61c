"""Moves the training state of a donor to a joining rack. Loop thread; workers and the lane move the
bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mend.coordination import events as ev
from mend.engine.buffers import unpooled
from mend.engine.digest import StateHash, bytes_of
from mend.engine.merging import said
from mend.engine.training_state import Given, LikeFirst, Received
from mend.types import Member, training_state_key

if TYPE_CHECKING:
    from mend.engine.concurrent_outer_step import ConcurrentOuterStep

BYTES_PER_ELEMENT_MAX = 64
PORTION_BYTES = 64 << 20
"""The worker touches or digests this much of a copy before it takes other work."""

SMALL_BYTES = 256 << 20
"""A joining rank takes no copy larger than SMALL_BYTES plus BYTES_PER_ELEMENT_MAX per element of
the model: the size comes from another process."""


class StateCopying:
    """Serves copies of one rank as a donor, and pulls one as a joiner."""

    def __init__(self, rank: ConcurrentOuterStep) -> None:
        self._rank = rank
        self._served: dict[Member, bytes] = {}
        """By joining rack, the key of its copy."""

    def give(self, to: Member, step: int, data_B: Given) -> None:
        """See `ConcurrentOuterStep.give_state`."""
        rank, me = self._rank, self._rank.me
        if isinstance(data_B, str):
            rank.tell(ev.StateTaken(to, step, 0, "", data_B))
            return
        if isinstance(data_B, LikeFirst):  # the first rank serves it for all
            self.free(to)
            rank.tell(ev.StateTaken(to, step, data_B.size, data_B.digest))
            return
        copied, state_hash = data_B, StateHash()

        def done() -> None:
            digest = state_hash.hexdigest()
            key = training_state_key(rank.member, me.rank, to, step, digest)
            self.free(to)
            self._served[to] = key
            rank.host.serve(key, bytes_of(copied))
            rank.tell(ev.StateTaken(to, step, copied.numel(), digest))

        self._in_portions(copied, state_hash.feed, done)

    def reserve(self, size: int) -> None:
        """Allocate memory for a copy and touch each page, as the first touch is slow. Without
        memory the copy is refused later, and this rank trains on."""
        try:
            room_B = unpooled(size)
        except OSError:
            room_B = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._in_portions(room_B, Tensor.zero_, lambda: self._rank.published.make_room(room_B))

    def _in_portions(
        self, data_B: Tensor, work: Callable[[Tensor], object], done: Callable[[], None]
    ) -> None:
        """Do `work` on the worker in portions, so that it can encode and merge in between."""
        left = iter(range(0, data_B.numel(), PORTION_BYTES))

        def go_on(result: object) -> None:
            if isinstance(result, Exception):
                self._rank.broken(result)
            elif (first := next(left, None)) is None:
                done()
            else:
                part_B = data_B[first : first + PORTION_BYTES]
                self._rank.work(lambda: work(part_B), go_on)

        go_on(None)

    def free(self, to: Member) -> None:
        if (key := self._served.pop(to, None)) is not None:
            self._rank.host.drop(key)

    def copy(self, effect: ev.CopyState) -> None:
        """Pull the copy that a donor serves, and publish it."""
        rank, donor = self._rank, effect.donor

        def end(error: str) -> None:
            rank.tell(ev.StateCopied(donor, effect.step, effect.digest, error))

        elements = sum(owned.numel for owned in rank.owned) * rank.rank_machine.options.ranks
        limit = SMALL_BYTES + BYTES_PER_ELEMENT_MAX * elements
        if effect.size > limit:
            end(f"it has {effect.size} bytes; at most {limit} are taken")
            return
        data_B = torch.empty(effect.size, dtype=torch.uint8, device="cpu")

        passed_on = effect.shared and rank.me.rank != 0  # the first rank passes it on
        meter = rank.pulls.begin(rank.me.rack, 0 if passed_on else effect.size)

        def done(error: Exception | None) -> None:
            rank.pulls.end(rank.me.rack, meter, whole=error is None)
            rank.published.pulling = False
            if error is None:
                copied = (donor.rack, effect.step, effect.digest, data_B, effect.shared)
                rank.published.receive(Received(*copied))
            end(said(error))

        if passed_on:
            done(None)
            return
        rank.published.pulling = True

        key = training_state_key(donor, rank.me.rank, rank.member, effect.step, effect.digest)
        data = data_B.numpy().data
        rank.host.fetch((effect.holder,), key, effect.digest, data, done, meter=meter)
