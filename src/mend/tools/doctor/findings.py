"""Findings of a meeting of racks, and what to change. Pure.

docs/internals/doctor.md lists them."""

from __future__ import annotations

from collections.abc import Iterator

from mend.tools.doctor.jobs import OF_A_MEETING, STOP_IT
from mend.tools.doctor.terms import Finding, Meeting, Seen, ok, problem, rate, remark

CLOCK_MS_MAX = 1_000.0
"""Times of day may differ by so much before it is noted: nothing is decided by them."""

LOST_PCT_MAX = 5.0
WINDOW_SHARE = 0.5
"""The socket buffers are the likely limit from this share of what they let through."""

STREAMS = 4
"""Connections of one transfer."""

WINDOW_MS_MIN = 5.0
"""Shortest round trip on which the buffers can be the limit."""

WINDOW_MB_MAX = 256
"""No more than this is recommended for one socket."""


def of_meeting(meeting: Meeting) -> list[Finding]:
    """Everything there is to say, by rack."""
    findings = list(_of_the_whole(meeting))
    for seen in meeting.peers:
        findings += _of_start(meeting, seen) if meeting.failure else []
        findings += _of_settings(meeting, seen)
        findings += _of_trips(meeting, seen)
        findings += _of_flow(meeting, seen)
    return findings


# ------------------------------------------------------------------ whether they begin


def _of_the_whole(meeting: Meeting) -> Iterator[Finding]:
    if meeting.failure:
        yield problem("meeting", f"The racks did not begin: {meeting.failure}.")
    elif meeting.outcome:
        yield problem("meeting", f"The racks began, and this one ended {meeting.outcome}.")
    elif missing := [
        s.rack for s in meeting.peers if s.error or (meeting.megabytes and not s.mbit)
    ]:
        racks = ", ".join(map(str, missing))
        change = "See the findings about these racks, also those of their own doctors."
        yield problem("meeting", f"The racks began, and nothing was pulled from {racks}.", change)
    else:
        text = f"all {meeting.racks} racks began together, exchanged and ended in"
        yield ok("meeting", f"{text} {meeting.seconds:.1f} s; what a job compares is equal")
    if meeting.witness is not None:
        yield _of_witness(meeting.witness)


def _of_witness(seen: Seen) -> Finding:
    address = seen.address
    if seen.answer == "open" and seen.speaks:
        return ok("witness", f"the witness's port answers at {address}")
    if seen.answer == "open":
        found = f"What listens at MEND_WITNESS_ADDR={address} is not a witness."
        change = "Point MEND_WITNESS_ADDR at the --bind of `mend coordinate`."
        return problem("witness", found, change)
    if seen.answer == "refused":
        found = f"Nothing listens at MEND_WITNESS_ADDR={address} so far; the machine answers."
        change = "Start `mend coordinate` there before the job."
        return remark("witness", found, change)
    found = f"MEND_WITNESS_ADDR={address} cannot be reached ({seen.answer or 'not tried'})."
    return problem("witness", found, _remedy_of(seen.answer, address))


def _of_start(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    """What is known of one rack, where the job could not begin."""
    topic, rack, at = f"rack {seen.rack}", seen.rack, seen.address
    if seen.refused:
        change = "Set it alike on all racks; one MEND_CONFIG file is safest."
        yield problem(topic, f"{seen.refused}.", change)
    elif not meeting.timed_out or not seen.answer:
        return
    elif seen.job:
        yield _of_view(meeting, seen)
    elif seen.locked:
        yield problem(
            topic,
            f"What listens at {at} has another key, or one of the two sides has none.",
            "Compare `sha256sum $MEND_KEY_FILE` on both.",
        )
    elif seen.answer == "open" and seen.speaks:
        yield problem(
            topic,
            f"Something that speaks as mend does listens at {at}, and answers no look.",
            "It is a job with observe=false, or another version of mend: see which process.",
        )
    elif seen.answer == "open":
        change = f"Change entry {rack} of MEND_SIDEBAND_PEERS on all racks, or end that program."
        yield problem(topic, f"What listens at {at} is not mend.", change)
    else:
        state = _state_of_port(seen)
        found = f"Rack {rack} did not come: {at} {state}."
        if seen.hello:
            found = (
                f"One direction fails: rack {rack} is heard here, but nothing from here reaches it "
                f"at {at} ({state})."
            )
        yield problem(topic, found, _remedy_of(seen.answer, at))


def _of_view(meeting: Meeting, seen: Seen) -> Finding:
    """Of a rack that answers a look: this direction works."""
    topic, rack, mine = f"rack {seen.rack}", seen.rack, meeting.rack
    if seen.job != meeting.job and not seen.job.endswith(OF_A_MEETING):
        return problem(topic, f"Job {seen.job!r} is running at {seen.address}.", STOP_IT)
    if seen.job != meeting.job:
        theirs, ours = (name.removesuffix(OF_A_MEETING) for name in (seen.job, meeting.job))
        found = f"Rack {rack} came with job id {theirs!r}; this rack has {ours!r}."
        return problem(topic, found, "Set the same MEND_JOB_ID on all racks.")
    if mine == 0 and not seen.hello:
        return problem(
            topic,
            f"One direction fails: rack {rack} is there and is reached from here, but nothing of "
            f"it arrives at {meeting.address}.",
            f"Look at the way from rack {rack} to here: its entry {mine} of MEND_SIDEBAND_PEERS, "
            "and the firewalls between the two.",
        )
    if rack == 0 and not meeting.answered:
        return problem(
            topic,
            f"One direction fails: rack {rack} is there and is reached from here, but its answer "
            f"does not arrive at {meeting.address}.",
            f"Rack {rack} has to reach that address: check MEND_ADVERTISE_HOST here, entry {mine} "
            f"of MEND_SIDEBAND_PEERS on rack {rack}, and the firewalls between the two.",
        )
    why = f": {seen.waits}" if seen.waits else ""
    return ok(topic, f"it is there at {seen.address}, and waits as well{why}")


def _state_of_port(seen: Seen) -> str:
    says = {
        "refused": "refused the connection",
        "silent": "gives no answer, neither yes nor no",
        "no route": "cannot be reached from here: no route",
        "no such name": "has a name that nothing here knows",
    }
    return says[seen.answer] + (f": {seen.detail}" if seen.detail else "")


def _remedy_of(answer: str, address: str) -> str:
    """Return the remedy for an answer, the most likely causes first."""
    remedies = {
        "refused": (
            f"The machine is there and nothing listens at {address}. Start `mend doctor --meet` "
            "there within --for seconds; if it runs, it listens elsewhere: its MEND_SIDEBAND_ADDR "
            "must be reached from here and have this port. Some firewalls refuse, too."
        ),
        "silent": (
            f"A firewall drops the packets, the host is down, or it is the wrong host. Let TCP to "
            f"{address} in, both ways (docs/operations.md, Ports and firewalls); check that "
            "MEND_SIDEBAND_PEERS names an address of that machine that is reached from here."
        ),
        "no route": (
            f"No network of this machine leads to {address}. Check the address (a container's own "
            "is not reached from outside), the routes, and that the interface is up."
        ),
        "no such name": (
            f"Correct the name in {address}, enter it in DNS or /etc/hosts, or use the number."
        ),
    }
    return remedies.get(
        answer, "Compare MEND_SIDEBAND_PEERS, MEND_SIDEBAND_ADDR and MEND_JOB_ID on both sides."
    )


# ------------------------------------------------------------------ what should be equal


def _of_settings(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    topic, rack = f"rack {seen.rack}", seen.rack
    for name, theirs in seen.settings.items():
        mine = meeting.settings.get(name, theirs)
        if mine != theirs and name == "witness":
            yield problem(
                topic,
                f"Rack {meeting.rack if mine else rack} has a witness, and the other one has none.",
                "Set MEND_WITNESS_ADDR alike on all racks.",
            )
        elif mine != theirs:
            found = f"{name} is {mine:g} here and {theirs:g} on rack {rack}."
            yield remark(topic, found, "No rack is refused for it; it should be alike.")


# ------------------------------------------------------------------ how fast


def _of_trips(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    topic = f"rack {seen.rack}"
    if seen.clock_ms is not None and abs(seen.clock_ms) > CLOCK_MS_MAX:
        yield remark(
            topic,
            f"its time of day is {seen.clock_ms / 1000:+.1f} s off ours.",
            "Nothing is decided by it, but logs and events of the racks cannot be laid side by "
            "side: run chrony or ntpd on both.",
        )
    elif seen.clock_ms is not None:
        yield ok(topic, "its time of day is within a second of ours")
    if seen.p50_ms is None or seen.p99_ms is None:
        return
    count = f"{seen.trips} connections"
    found = f"round trip {seen.p50_ms:.2f} ms, p99 {seen.p99_ms:.2f} ms ({count})"
    if seen.p99_ms > meeting.detect_ms / 4:
        wanted = round(meeting.heartbeat_ms * 4 * seen.p99_ms / meeting.detect_ms + 0.5)
        yield remark(
            topic,
            f"{found}: a rack is taken for silent after {meeting.detect_ms:.0f} ms.",
            f"Set MEND_SIDEBAND_HEARTBEAT_MS={max(wanted, 2 * meeting.heartbeat_ms)} on all racks.",
        )
    else:
        yield ok(topic, found)
    lost_pct = 100 * (1 - seen.trips / seen.tried)
    if lost_pct > LOST_PCT_MAX:
        found = f"{lost_pct:.0f} % of the connections did not come about in time."
        change = "The link loses packets, or a machine was busy: look at both, and run it again."
        yield remark(topic, found, change)


def _of_flow(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    topic, rack, mine = f"rack {seen.rack}", seen.rack, meeting.rack
    if seen.error:
        yield problem(
            topic,
            f"Rack {mine} cannot pull from rack {rack}: {seen.error}",
            f"Set MEND_DATA_PORTS on rack {rack}, let that range in there, and set its "
            f"MEND_ADVERTISE_HOST to an address that rack {mine} reaches.",
        )
    if seen.mbit is None:
        return
    text = f"rack {rack} to rack {mine}: {rate(seen.mbit)} in {seen.megabytes:.3g} MB"
    yield ok(topic, f"{text}, while all racks pulled from all")
    limit = window_mbit(meeting.buffers, seen.p50_ms)
    if limit is not None and seen.p50_ms is not None and seen.mbit > WINDOW_SHARE * limit:
        wanted = min(WINDOW_MB_MAX, 2 ** (int(seen.mbit * seen.p50_ms / 4000).bit_length() + 1))
        yield remark(
            topic,
            f"The socket buffers of this machine let {rate(limit)} through at a round trip of "
            f"{seen.p50_ms:.0f} ms; {rate(seen.mbit)} came. They are the likely limit.",
            f"Raise the last number of net.ipv4.tcp_rmem and tcp_wmem to {wanted << 20} "
            "(sysctl -w) on all racks, and run it again.",
        )


def window_mbit(buffers: tuple[int, int] | None, trip_ms: float | None) -> float | None:
    """Return the most that STREAMS connections carry: a window per round trip each. About half of a
    receive buffer is window (tcp_adv_win_scale = 1), two thirds of a send buffer are payload."""
    if buffers is None or trip_ms is None or trip_ms < WINDOW_MS_MIN:
        return None
    window_bytes = min(buffers[0] // 2, buffers[1] * 2 // 3)
    return STREAMS * window_bytes * 8 / 1000 / trip_ms
