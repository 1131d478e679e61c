"""What round trips, clocks and bandwidths mean, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mend.tools.doctor.terms import Finding, Meeting, Seen, note, ok, problem, rate

CLOCK_MS_MAX = 1_000.0
"""Times of day may differ by so much before it is worth a word: nothing is decided by them."""

SLANT = 3.0
"""One direction may be so many times faster than the other."""

LOST_PCT_MAX = 5.0
WINDOW_SHARE = 0.5
"""From this share of what the socket buffers let through on, they are the likely limit."""

STREAMS = 4
"""Connections of one transfer."""

WINDOW_MS_MIN = 5.0
"""On a shorter round trip the buffers are no limit."""

WINDOW_MB_MAX = 256
"""No more than this is recommended for one socket."""


def of_trips(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    topic = f"rack {seen.rack}"
    if seen.p50_ms is None or seen.p99_ms is None:
        if seen.hears_us:
            found = f"No ping to rack {seen.rack} was answered, although each hears the other."
            yield note(topic, found, "Run it again with a longer --for.")
        return
    found = f"round trip {seen.p50_ms:.2f} ms, p99 {seen.p99_ms:.2f} ms ({seen.trips} pings)"
    if seen.p99_ms > meeting.detect_ms / 4:
        wanted = round(meeting.heartbeat_ms * 4 * seen.p99_ms / meeting.detect_ms + 0.5)
        yield note(
            topic,
            f"{found}: a rack is taken for silent after {meeting.detect_ms:.0f} ms.",
            f"Set MEND_SIDEBAND_HEARTBEAT_MS={max(wanted, 2 * meeting.heartbeat_ms)} on all racks.",
        )
    else:
        yield ok(topic, found)
    lost_pct = 100 * (1 - seen.trips / seen.asked) if seen.asked else 0.0
    if lost_pct > LOST_PCT_MAX:
        yield note(
            topic,
            f"{lost_pct:.0f} % of the pings had no answer in time.",
            "The link loses packets, or a machine was busy: look at both, and run it again.",
        )
    if seen.clock_ms is not None and abs(seen.clock_ms) > CLOCK_MS_MAX:
        yield note(
            topic,
            f"its time of day is {seen.clock_ms / 1000:+.1f} s off ours.",
            "Nothing is decided by it, but logs and events of the racks cannot be laid side by "
            "side: run chrony or ntpd on both.",
        )
    elif seen.clock_ms is not None:
        yield ok(topic, f"its clock is {seen.clock_ms:+.1f} ms off ours")


def of_flows(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    topic, rack, mine = f"rack {seen.rack}", seen.rack, meeting.rack
    if seen.lane.startswith(("127.", "localhost:", "::1")) and not seen.same_machine:
        yield problem(
            topic,
            f"Rack {rack} is on another machine ({seen.host}) and says that its payloads are at "
            f"{seen.lane}, which is this machine.",
            f"Set MEND_ADVERTISE_HOST on rack {rack} to the address it is reached at from here.",
        )
    for flow, source, sink in ((seen.here, rack, mine), (seen.there, mine, rack)):
        if flow is not None and flow.error:
            yield problem(
                topic,
                f"Rack {sink} cannot pull from rack {source}: {flow.error}.",
                f"Set MEND_DATA_PORTS on rack {source}, let that range in there, and set its "
                f"MEND_ADVERTISE_HOST to an address that rack {sink} reaches.",
            )
        elif flow is not None and flow.mbit is not None:
            told = f"rack {source} to rack {sink}: {rate(flow.mbit)} in {flow.megabytes:.3g} MB"
            yield ok(topic, told)
    if seen.here is None and seen.hears_us and not meeting.turns_done:
        yield note(
            topic,
            f"Bandwidth to rack {rack} was not measured: the turns did not come to an end.",
            "Start the doctors closer together, or with a longer --for.",
        )
    yield from _of_rates(meeting, seen)


def _of_rates(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    rates = [flow.mbit for flow in (seen.here, seen.there) if flow is not None and flow.mbit]
    topic = f"rack {seen.rack}"
    if len(rates) == 2 and max(rates) > SLANT * min(rates):
        yield note(
            topic,
            f"One direction is {max(rates) / min(rates):.1f} times as fast as the other.",
            "A round waits for the slower one. Look for a shaper, a slower card, losses one way "
            "(`nstat -az TcpRetransSegs`), or other traffic.",
        )
    limit = window_mbit(meeting.buffers, seen.p50_ms)
    best = max(rates, default=0.0)
    if limit is not None and seen.p50_ms is not None and best > WINDOW_SHARE * limit:
        wanted = min(WINDOW_MB_MAX, 2 ** (int(best * seen.p50_ms / 4000).bit_length() + 1))
        yield note(
            topic,
            f"The socket buffers of this machine let {rate(limit)} through at a round trip of "
            f"{seen.p50_ms:.0f} ms; {rate(best)} came. They are the likely limit.",
            f"Raise the last number of net.ipv4.tcp_rmem and tcp_wmem to {wanted << 20} "
            "(sysctl -w) on all racks, and run it again.",
        )


def window_mbit(buffers: tuple[int, int] | None, trip_ms: float | None) -> float | None:
    """What STREAMS connections carry at most: a window per round trip each. About half of a
    receive buffer is window (tcp_adv_win_scale = 1), two thirds of a send buffer are payload."""
    if buffers is None or trip_ms is None or trip_ms < WINDOW_MS_MIN:
        return None
    window_bytes = min(buffers[0] // 2, buffers[1] * 2 // 3)
    return STREAMS * window_bytes * 8 / 1000 / trip_ms
