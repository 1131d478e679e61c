"""Mirrors: racks keep the registered state of scope rack for each other. Loop thread.

A rank serves its state as of each of its captures. When a commit merges the capture, the same rank
of the next live rack, in ascending order, fetches the state and keeps it in memory. A rack that
returns asks the others for it. All of this goes over the lane, nothing through messages or records.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mend.consensus.records import Commit, Record, Roster, Seat
from mend.engine.compute.digest import bytes_of, digest_of_state
from mend.engine.joining.inbox import MirrorInbox
from mend.engine.joining.training_state import RACK_STATE_BYTES_MAX, Mirror, Mirrored
from mend.engine.loop.feature import LoopFeature, LoopParts
from mend.errors import PayloadGone, format_error
from mend.events.kinds import MirrorFailed, MirrorKept, MirrorMissed
from mend.types import Address, Member, mirrors_key, rack_state_key

KEPT = 2
"""Mirrors that a rank keeps of another one: if some rank of its rack misses the newest mirror, all
of them still have the one before."""

SPARE = 2
"""Own states that are served besides those of open offers: another rack may still fetch them."""

MISSED_MAX = 2
"""Consecutive failed fetches before a warning. A single failure is normal: the owner may have
dropped that state already."""

_HEAD = struct.Struct("!Q16s")
"""A head: size of a state in bytes, and its digest."""

_ENTRY = struct.Struct("!QQQQ16s")
"""A mirror: round (0: an empty entry), incarnation, step, bytes, digest."""


class RackStateMirrors(LoopFeature):
    """The mirrors of one rank: serves its own states, keeps those of another rack, fetches its own
    back."""

    def __init__(self, parts: LoopParts) -> None:
        self._store, self._jobs, self._machine = parts.store, parts.jobs, parts.machine
        self._host, self._me = parts.store.host, parts.store.me
        self._published = parts.jobs.published
        self._inbox = self._published.of(MirrorInbox)
        self._own: dict[int, tuple[bytes, bytes]] = {}
        """step -> keys of the head and of the state."""
        self._kept: dict[int, list[Mirrored]] = {}
        """By rack, oldest first."""
        self._missed: dict[int, int] = {}
        """By rack, failed fetches since the last success."""
        self._due: dict[int, tuple[Member, int, int] | None] = {}
        """By rack whose state is being fetched: the newest state that came due meanwhile. A rack
        that reads a long log at once must not fetch every state in it."""

    def _seats(self) -> Mapping[int, Seat]:
        """By rack, as the log has them."""
        return self._machine.folded.seats

    def decided(self, record: Record) -> None:
        if isinstance(record, Roster):
            for rack in record.retired:
                self._drop(rack)
            return
        rules = self._store.rules
        if isinstance(record, Commit) and not rules[record.fragment].numerics.of_values:
            self.committed(record, sum(known.decided for known in self._published.fragments))

    # -------------------------------------------------------------- of this rank

    def serve(self, step: int, data_B: Tensor) -> None:
        """Serve the state of a capture after `step`."""

        def done(digest: str) -> None:
            where = self._store.member, self._me.rank, step
            head, state = rack_state_key(*where), rack_state_key(*where, digest)
            self._host.serve(state, bytes_of(data_B))
            self._host.serve(head, memoryview(_HEAD.pack(data_B.numel(), bytes.fromhex(digest))))
            self._own[step] = head, state
            self._drop_old()

        self._jobs.run(lambda: digest_of_state(data_B), done)

    def _drop_old(self) -> None:
        """Drop the states whose offers are no longer open, except the newest SPARE of them."""
        open_ = {offer.capture_step for offer in self._store.offers.values()}
        for step in sorted(self._own.keys() - open_)[:-SPARE]:
            for key in self._own.pop(step):
                self._host.drop(key)

    # -------------------------------------------------------------- of another rack

    def committed(self, commit: Commit, number: int) -> None:
        """Fetch the states of the members that this rack keeps mirrors of. `number`: of rounds
        decided so far."""
        for share in commit.members:
            owner = share.member
            # A closing offer is the last one, unless the rack is to be started again.
            returns = not share.closing or self._machine.folded.is_evicted(owner.rack)
            if owner.rack == self._me.rack or not returns:
                continue
            if holder_of(owner.rack, self._live_racks()) == self._me.rack:
                self._follow(owner, share.capture_step, number)
                continue
            self._drop(owner.rack)

    def _drop(self, rack: int) -> None:
        """Drop the mirrors of a rack that will not return, or whose mirrors another rack keeps."""
        self._missed.pop(rack, None)
        if rack in self._kept:
            self._keep(rack, [])

    def _live_racks(self) -> set[int]:
        """The live racks as far as known, including this one."""
        seats = set(self._seats())
        return (seats & set(self._published.orders.live) or seats) | {self._me.rack}

    def _follow(self, owner: Member, step: int, number: int) -> None:
        lane, newest = self._lane(owner), self._newest(owner.rack)
        if lane is None or (newest and newest.owner == owner and step <= newest.step):
            return
        if owner.rack in self._due:
            due = self._due[owner.rack]
            if due is None or due[0] != owner or due[1] < step:
                self._due[owner.rack] = owner, step, number
            return
        self._due[owner.rack] = None

        def done(result: Mirrored | str) -> None:
            self._landed(owner, step, result)
            if (due := self._due.pop(owner.rack)) is not None:
                self._follow(*due)

        self._fetch_both(lane, Mirror(number, owner, step, 0, "", self._me.rack), done)

    def _landed(self, owner: Member, step: int, result: Mirrored | str) -> None:
        """Keep a fetched state, or note the error."""
        if isinstance(result, str):
            missed = self._missed[owner.rack] = self._missed.get(owner.rack, 0) + 1
            self._host.note(MirrorMissed(owner.rack, step, result))
            if missed == MISSED_MAX:
                newest = self._newest(owner.rack)
                kept = str(newest.step) if newest else "none"
                self._host.note(MirrorFailed(owner.rack, step, result, kept))
            return
        self._missed.pop(owner.rack, None)
        self._keep(owner.rack, [*self._kept.get(owner.rack, []), result][-KEPT:])
        self._host.note(MirrorKept(owner.rack, step, result.mirror.size))

    def _newest(self, rack: int) -> Mirror | None:
        kept = self._kept.get(rack)
        return kept[-1].mirror if kept else None

    def _lane(self, owner: Member) -> Address | None:
        """The lane of this rank's counterpart in that life of a rack; None: it has no seat."""
        seat = self._seats().get(owner.rack)
        return seat.lanes[self._me.rank] if seat and seat.member == owner else None

    def _keep(self, rack: int, mirrors: list[Mirrored]) -> None:
        """Keep and serve these mirrors of a rack, and no others."""
        host, me = self._host, self._me.rank
        for each in self._kept.pop(rack, []):
            if each not in mirrors:
                host.drop(_state_key(each.mirror, me))
        if mirrors:
            self._kept[rack] = mirrors
            for each in mirrors:
                host.serve(_state_key(each.mirror, me), bytes_of(each.data_B))
            listed = b"".join(map(_entry, mirrors)).ljust(KEPT * _ENTRY.size, b"\0")
            host.serve(mirrors_key(rack, me), memoryview(listed))
        else:
            host.drop(mirrors_key(rack, me))
        self._inbox.kept_bytes = sum(
            each.mirror.size for kept in self._kept.values() for each in kept
        )

    def _fetch_both(
        self, lane: Address, mirror: Mirror, done: Callable[[Mirrored | str], None]
    ) -> None:
        """Size and digest first, then the state."""
        head = bytearray(_HEAD.size)

        def head_done(error: Exception | None) -> None:
            if error is not None:
                done(format_error(error))
                return
            size, digest = _HEAD.unpack(head)
            self._fetch(lane, replace(mirror, size=size, digest=digest.hex()), done)

        key = rack_state_key(mirror.owner, self._me.rank, mirror.step)
        self._host.fetch((lane,), key, "", memoryview(head), head_done)

    def _fetch(self, lane: Address, mirror: Mirror, done: Callable[[Mirrored | str], None]) -> None:
        """Fetch the state and check its digest. Its size is checked first, as it comes from another
        process."""
        if not 0 < mirror.size <= RACK_STATE_BYTES_MAX:
            done(f"it has {mirror.size} bytes; at most {RACK_STATE_BYTES_MAX} are taken")
            return
        data_B = torch.empty(mirror.size, dtype=torch.uint8, device="cpu")

        def landed(error: Exception | None) -> None:
            done(Mirrored(mirror, data_B) if error is None else format_error(error))

        key = _state_key(mirror, self._me.rank)
        self._host.fetch((lane,), key, mirror.digest, data_B.numpy().data, landed)

    # -------------------------------------------------------------- of a rack that returns

    def seek(self) -> None:
        """Ask every live rack for its mirrors of this one. Answers are published one by one, so
        that a frozen rack does not hide the mirrors of another."""
        me, mirrors = self._me, list[Mirror]()
        seats = self._seats()
        asked = self._live_racks() & seats.keys() - {me.rack}
        awaited, unheard = set(asked), set(asked)

        def publish() -> None:
            mirrors.sort(key=lambda mirror: (mirror.round, -mirror.holder))
            missing = tuple(sorted(unheard))
            self._inbox.find(tuple(mirrors), missing, complete=not awaited)

        def ask(holder: int) -> None:
            listed = bytearray(KEPT * _ENTRY.size)

            def done(error: Exception | None) -> None:
                awaited.remove(holder)
                if error is None or isinstance(error, PayloadGone):  # the rack keeps none
                    unheard.remove(holder)
                if error is None:
                    mirrors.extend(_listed(listed, me.rack, holder))
                publish()

            lanes, key = (seats[holder].lanes[me.rank],), mirrors_key(me.rack, me.rank)
            self._host.fetch(lanes, key, "", memoryview(listed), done)

        publish()
        for holder in sorted(asked):
            ask(holder)

    def fetch(self, mirror: Mirror) -> None:
        """Fetch one of the listed mirrors and publish it, or the error."""
        seat = self._seats().get(mirror.holder)
        done = partial(self._inbox.take_back, mirror)
        if seat is None:
            done(f"rack {mirror.holder} has left")
            return
        self._fetch(seat.lanes[self._me.rank], mirror, done)


def holder_of(rack: int, live: Iterable[int]) -> int | None:
    """The rack that keeps the mirrors of `rack`: the next live one in ascending order; after the
    last rack, the first. None: there is no other."""
    others = sorted(set(live) - {rack})
    return next((other for other in others if other > rack), others[0] if others else None)


def _state_key(mirror: Mirror, rank: int) -> bytes:
    return rack_state_key(mirror.owner, rank, mirror.step, mirror.digest)


def _entry(kept: Mirrored) -> bytes:
    mirror = kept.mirror
    digest = bytes.fromhex(mirror.digest)
    return _ENTRY.pack(mirror.round, mirror.owner.incarnation, mirror.step, mirror.size, digest)


def _listed(entries: bytes | bytearray, rack: int, holder: int) -> list[Mirror]:
    return [
        Mirror(number, Member(rack, incarnation), step, size, digest.hex(), holder)
        for number, incarnation, step, size, digest in _ENTRY.iter_unpack(entries)
        if number
    ]
