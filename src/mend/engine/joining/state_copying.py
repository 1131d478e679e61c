"""Moves the training state of a donor to a joining rack. Loop thread; workers and the lane move the
bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash
from torch import Tensor

from mend.coordination import events as ev
from mend.engine.compute.buffers import unpooled
from mend.engine.compute.digest import bytes_of
from mend.engine.joining.inbox import StateInbox
from mend.engine.joining.training_state import Given, LikeFirst, ReceivedState, StateUnavailable
from mend.engine.loop.effects import Handlers
from mend.engine.loop.feature import LoopFeature, LoopParts
from mend.errors import format_error
from mend.types import Member, training_state_key

BYTES_PER_ELEMENT_MAX = 64
"""See SMALL_BYTES."""
PORTION_BYTES = 64 << 20
"""The worker touches or digests this much of a copy before it takes other work."""

SMALL_BYTES = 256 << 20
"""A joining rank takes no copy larger than SMALL_BYTES plus BYTES_PER_ELEMENT_MAX per element of
the model: the size comes from another process."""


class StateCopying(LoopFeature):
    """Serves copies of one rank as a donor, and pulls one as a joiner."""

    def __init__(self, parts: LoopParts) -> None:
        self._store, self._jobs = parts.store, parts.jobs
        self._ranks = parts.machine.options.ranks
        self._inbox = parts.jobs.published.of(StateInbox)
        self._served: dict[Member, bytes] = {}
        """By joining rack, the key of its copy."""

    def handlers(self) -> Handlers:
        return {
            ev.CopyState: self.copy,
            ev.NoState: lambda it: self._inbox.receive(StateUnavailable(it.reason, it.step)),
            ev.AskedState: lambda it: self._inbox.ask(it.racks),
            ev.FreeState: self._forget,
        }

    def _forget(self, effect: ev.FreeState) -> None:
        self.free(effect.to)
        self._inbox.free(effect.to)

    def give(self, to: Member, step: int, data_B: Given) -> None:
        """Take the copy of the training state for a joining rack, or the reason why there is none,
        and serve it."""
        store, tell = self._store, self._jobs.tell
        if isinstance(data_B, str):
            tell(ev.StateTaken(to, step, 0, "", data_B))
            return
        if isinstance(data_B, LikeFirst):  # the first rank serves it for all
            self.free(to)
            tell(ev.StateTaken(to, step, data_B.size, data_B.digest))
            return
        copied, state_hash = data_B, xxhash.xxh3_128()

        def done() -> None:
            digest = state_hash.hexdigest()
            key = training_state_key(store.member, store.me.rank, to, step, digest)
            self.free(to)
            self._served[to] = key
            store.host.serve(key, bytes_of(copied))
            tell(ev.StateTaken(to, step, copied.numel(), digest))

        self._in_portions(copied, lambda part_B: state_hash.update(bytes_of(part_B)), done)

    def reserve(self, size: int) -> None:
        """Allocate memory for a copy and touch every page, as the first touch is slow. If there is
        no memory, the copy is refused later, and this rank trains on."""
        try:
            room_B = unpooled(size)
        except OSError:
            room_B = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._in_portions(room_B, Tensor.zero_, lambda: self._inbox.make_room(room_B))

    def _in_portions(
        self, data_B: Tensor, work: Callable[[Tensor], object], done: Callable[[], None]
    ) -> None:
        """Do `work` on the worker in portions, so that it can encode and merge in between."""
        left = iter(range(0, data_B.numel(), PORTION_BYTES))

        def go_on(_: object) -> None:
            if (first := next(left, None)) is None:
                done()
            else:
                part_B = data_B[first : first + PORTION_BYTES]
                self._jobs.run(lambda: work(part_B), go_on)

        go_on(None)

    def free(self, to: Member) -> None:
        if (key := self._served.pop(to, None)) is not None:
            self._store.host.drop(key)

    def copy(self, effect: ev.CopyState) -> None:
        """Pull the copy that a donor serves, and publish it."""
        store, donor, inbox = self._store, effect.donor, self._inbox

        def end(error: str) -> None:
            self._jobs.tell(ev.StateCopied(donor, effect.step, effect.digest, error))

        elements = sum(rules.owned.numel for rules in store.rules) * self._ranks
        limit = SMALL_BYTES + BYTES_PER_ELEMENT_MAX * elements
        if effect.size > limit:
            end(f"it has {effect.size} bytes; at most {limit} are taken")
            return
        data_B = torch.empty(effect.size, dtype=torch.uint8, device="cpu")

        passed_on = effect.shared and store.me.rank != 0  # the first rank broadcasts its copy
        meter = store.pulls.begin(store.me.rack, 0 if passed_on else effect.size)

        def done(error: Exception | None) -> None:
            store.pulls.end(store.me.rack, meter, whole=error is None)
            inbox.pulling = False
            if error is None:
                copied = (donor.rack, effect.step, effect.digest, data_B, effect.shared)
                inbox.receive(ReceivedState(*copied))
            end(format_error(error))

        if passed_on:
            done(None)
            return
        inbox.pulling = True

        key = training_state_key(donor, store.me.rank, store.member, effect.step, effect.digest)
        data = data_B.numpy().data
        store.host.fetch((effect.holder,), key, effect.digest, data, done, meter=meter)
