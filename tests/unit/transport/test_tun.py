"""The link's device on an invented clock: which packets arrive, when, and in which order."""

from __future__ import annotations

import os
import select

import pytest

from mend.transport import tun
from mend.transport.tun import QUEUE_NS_MAX, Wire, destination, forward

MS = 1_000_000
RACK_0, RACK_1 = 10, 11
"""Interfaces, as file numbers."""


def wire(rate_bits: int = 8_000_000, one_way_ms: int = 10, loss: float = 0.0) -> Wire:
    """1000 bytes take a millisecond."""
    return Wire(rate_bits=rate_bits, one_way_ns=one_way_ms * MS, loss=loss, seed=7)


def packet(to: tuple[int, ...] = (10, 213, 0, 2), size: int = 1000) -> bytes:
    return bytes([0x45, *[0] * 15, *to]).ljust(size, b"\0")


def test_a_packet_arrives_after_the_delay_and_not_before() -> None:
    link = wire()
    link.take(b"first", RACK_1, now_ns=5 * MS)
    assert link.deadline_ns == 15 * MS
    assert link.pop_arrived(15 * MS - 1) == []
    assert link.pop_arrived(15 * MS) == [(RACK_1, b"first")]
    assert link.deadline_ns is None


def test_two_senders_share_the_rate_of_the_one_they_send_to() -> None:
    """tbf limits what each sends; without this, three racks would give one twice its rate."""
    link = wire()
    for sender in range(3):
        link.take(bytes([sender]) * 1000, RACK_1, now_ns=0)
    link.take(b"elsewhere", RACK_0, now_ns=0)
    arrivals = {}
    for now_ms in range(20):
        for to, data in link.pop_arrived(now_ms * MS):
            arrivals[to, data[:1]] = now_ms
    assert arrivals == {
        (RACK_1, b"\0"): 10, (RACK_0, b"e"): 10, (RACK_1, b"\1"): 11, (RACK_1, b"\2"): 12,
    }  # fmt: skip


def test_packets_to_one_rack_keep_their_order() -> None:
    link = wire()
    for number in range(50):
        link.take(bytes([number]), RACK_1, now_ns=number // 7)
    assert [data[0] for _, data in link.pop_arrived(60 * MS)] == list(range(50))


def test_a_queue_that_is_full_drops() -> None:
    link = wire()
    most = QUEUE_NS_MAX // MS  # packets of a millisecond each
    for _ in range(most + 5):
        link.take(packet(), RACK_1, now_ns=0)
    assert link.dropped == 4  # the one that would begin just at the limit is still taken
    assert len(link.pop_arrived(10_000 * MS)) == most + 1


def test_lost_packets_are_drawn_from_the_seed_alone() -> None:
    def survivors(loss: float) -> list[int]:
        link = wire(rate_bits=10**12, loss=loss)
        for number in range(20_000):
            link.take(number.to_bytes(4, "big"), RACK_1, now_ns=number)
        assert link.taken == 20_000
        assert link.dropped == 0
        return [int.from_bytes(data, "big") for _, data in link.pop_arrived(1000 * MS)]

    kept = survivors(0.03)
    assert kept == survivors(0.03)
    assert 20_000 - len(kept) == pytest.approx(600, abs=4 * (600 * 0.97) ** 0.5)
    assert len(survivors(0.0)) == 20_000


def test_only_ipv4_has_somewhere_to_go() -> None:
    assert destination(packet((10, 213, 0, 254))) == bytes([10, 213, 0, 254])
    assert destination(bytes([0x60]) + bytes(60)) is None
    assert destination(b"\x45short") is None


def test_the_loop_carries_packets_between_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes in place of TUN interfaces: what is written to one end, its packets find their way.

    A clock of its own: `select` is where time passes, so the loop never waits.
    """

    class Over(Exception):
        pass

    now_ns = 0
    reads, writes = zip(os.pipe(), os.pipe(), strict=True)
    for end in reads:
        os.set_blocking(end, False)

    def passing(files: list[int], _w: object, _x: object, wait_s: float | None) -> object:
        nonlocal now_ns
        if wait_s is None and not select_now(files):
            raise Over
        now_ns += round((wait_s or 0) * 1e9)
        return select_now(files), [], []

    def select_now(files: list[int]) -> list[int]:
        return real_select(files, [], [], 0)[0]

    sent: list[tuple[int, bytes]] = []
    real_select = select.select
    monkeypatch.setattr(tun.select, "select", passing)
    monkeypatch.setattr(tun.time, "monotonic_ns", lambda: now_ns)
    own_write = os.write
    monkeypatch.setattr(tun.os, "write", lambda to, data: sent.append((to, data)))
    tuns = {bytes([10, 213, 0, 1]): reads[0], bytes([10, 213, 0, 2]): reads[1]}
    own_write(writes[0], packet((10, 213, 0, 2), 40))
    own_write(writes[1], packet((10, 213, 0, 9), 40))  # nobody has this address
    with pytest.raises(Over):
        forward(tuns, wire())
    assert sent == [(reads[1], packet((10, 213, 0, 2), 40))]
    assert now_ns == 10 * MS
    for end in (*reads, *writes):
        os.close(end)
