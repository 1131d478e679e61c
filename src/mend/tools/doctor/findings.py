"""Findings of a meeting of racks, and what to change. Pure; docs/doctor.md lists them."""

from __future__ import annotations

from collections.abc import Iterator

from mend.tools.doctor.terms import Finding, Meeting, Seen, ok, problem, rate, remark
from mend.types import rack_name

CLOCK_MS_MAX = 1_000.0
"""Times of day may differ by so much before it is worth a word: nothing is decided by them."""

SLANT = 3.0
"""One direction may be so many times faster than the other."""

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
        topic = f"rack {seen.rack}"
        if not (seen.heard and seen.hears_us):
            findings.append(problem(topic, *_absent(meeting, seen)))
        if seen.heard:
            findings += _of_settings(meeting, seen)
            findings += _of_trips(meeting, seen)
            findings += _of_flows(meeting, seen)
    return findings


# ------------------------------------------------------------------ who came


def _of_the_whole(meeting: Meeting) -> Iterator[Finding]:
    met = [seen.rack for seen in meeting.peers if seen.heard and seen.hears_us]
    if meeting.racks == 1:
        yield remark("meeting", "racks=1: there is nobody to meet.", "Set MEND_RACKS.")
    elif len(met) == len(meeting.peers):
        yield ok("meeting", f"all {meeting.racks} racks met in {meeting.seconds:.1f} s")
    elif met:
        named = ", ".join(map(str, met))
        yield remark("meeting", f"met {len(met)} of {len(meeting.peers)} racks: {named}")
    for rack in meeting.doubles:
        found = f"Two processes say that they are rack {rack} of job {meeting.job!r}."
        change = "Give every rack a MEND_RACK of its own; one doctor per rack (its local rank 0)."
        yield problem(f"rack {rack}", found, change)
    for rack, job in meeting.jobs:
        who = rack_name(rack)
        found = f"A job is running: {who} of job {job!r} sent frames of a job to {meeting.address}."
        change = "Doctors meet where a job would: stop the job first, or choose other ports."
        yield problem(f"rack {rack}", found, change)
    outside = [rack for rack, job in meeting.strangers if job == meeting.job]
    for rack in outside:
        found = f"Rack {rack} of this job came, but there are only {meeting.racks} here."
        change = "Set MEND_RACKS alike on all racks, and number them from 0."
        yield problem(f"rack {rack}", found, change)
    if meeting.garbage:
        found = f"{meeting.garbage} frames came that are neither a doctor's nor a job's."
        change = "Another program, or another version of mend, sends to this port: see who."
        yield remark("meeting", found, change)
    if meeting.witness is not None:
        yield _of_witness(*meeting.witness)


def _of_witness(address: str, answer: str, speaks: bool) -> Finding:
    if answer == "open" and speaks:
        return ok("witness", f"the witness's port answers at {address}")
    if answer == "open":
        found = f"What listens at MEND_WITNESS_ADDR={address} is no witness."
        change = "Point MEND_WITNESS_ADDR at the --bind of `mend coordinate`."
        return problem("witness", found, change)
    if answer == "refused":
        found = f"Nothing listens at MEND_WITNESS_ADDR={address} so far; the machine answers."
        change = "Start `mend coordinate` there before the job."
        return remark("witness", found, change)
    found = f"MEND_WITNESS_ADDR={address} cannot be reached ({answer or 'not tried'})."
    return problem("witness", found, _remedy_of(answer, address))


def _absent(meeting: Meeting, seen: Seen) -> tuple[str, str]:
    """Return (finding, remedy) for a rack that does not hear us, or is not heard."""
    mine, rack, at = meeting.rack, seen.rack, seen.address
    if seen.heard:
        return (
            f"One direction fails: rack {rack} is heard here, but nothing from here reaches it "
            f"at {at} ({_state_of_port(seen)}).",
            _remedy_of(seen.answer, at),
        )
    foreign = [job for other, job in meeting.strangers if other == rack and job != meeting.job]
    if foreign:
        return (
            f"Rack {rack} came with job id {foreign[0]!r}; this rack has {meeting.job!r}.",
            "Set the same MEND_JOB_ID on all racks.",
        )
    if seen.heard_by:
        named = ", ".join(map(str, seen.heard_by))
        return (
            f"Rack {rack} runs (heard by rack {named}), but nothing of it arrives here "
            f"({_state_of_port(seen)}).",
            f"Look at the way from rack {rack} to {meeting.address}: its entry {mine} of "
            "MEND_SIDEBAND_PEERS, and the firewalls between the two. " + _remedy_of("", at),
        )
    if seen.answer == "open" and seen.speaks:
        return (
            f"Something that speaks as mend does listens at {at}, but no doctor of rack {rack} "
            "was heard.",
            f"Either rack {rack}'s doctor cannot reach {meeting.address}: check entry {mine} of "
            "MEND_SIDEBAND_PEERS there, and whether a firewall here lets that port in. Or it is a "
            "job that runs: stop it first. Or its doctor has another MEND_RACK, or another key "
            "(compare `sha256sum $MEND_KEY_FILE`; one of the two may have none).",
        )
    if seen.answer == "open":
        return (
            f"What listens at {at} is not mend.",
            f"Another program has the port: change entry {rack} of MEND_SIDEBAND_PEERS on all "
            "racks, and where that rack listens.",
        )
    return f"Rack {rack} did not come: {at} {_state_of_port(seen)}.", _remedy_of(seen.answer, at)


def _state_of_port(seen: Seen) -> str:
    says = {
        "open": "accepts connections",
        "refused": "refused the connection",
        "silent": "gives no answer, neither yes nor no",
        "no route": "cannot be reached from here: no route",
        "no such name": "has a name that nothing here knows",
        "": "was not tried",
    }
    return says.get(seen.answer, seen.answer) + (f": {seen.detail}" if seen.detail else "")


def _remedy_of(answer: str, address: str) -> str:
    """Return the remedy for an answer, the most likely causes first."""
    remedies = {
        "refused": (
            f"The machine is there and nothing listens at {address}. Start `mend doctor --meet` "
            "there within --for seconds; if it runs, it listens elsewhere: its MEND_SIDEBAND_ADDR "
            "must not be 127.0.0.1 and must have this port. Some firewalls refuse, too."
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
        "open": (
            "The port is open from here. Is it the right machine, and is its doctor of this job? "
            "Compare MEND_SIDEBAND_PEERS on both sides."
        ),
    }
    return remedies.get(
        answer, "Compare MEND_SIDEBAND_PEERS, MEND_SIDEBAND_ADDR and MEND_JOB_ID on both sides."
    )


# ------------------------------------------------------------------ what must be equal


def _of_settings(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    topic, rack = f"rack {seen.rack}", seen.rack
    unequal = list(_unequal(meeting.facts, seen.facts))
    for name, mine, theirs in unequal:
        change = "Run the same mend on all racks."
        if name not in _OF_THE_PACKAGE:
            change = f"Set {_variable(name)} alike on all racks; one MEND_CONFIG file is safest."
        found = f"{name} is {mine} here and {theirs} on rack {rack}."
        yield problem(topic, found, change)
    if not unequal:
        yield ok(topic, f"{len(meeting.facts)} settings are equal")
    for name, mine, theirs in _unequal(meeting.wishes, seen.wishes):
        found = f"{name} is {mine} here and {theirs} on rack {rack}."
        yield remark(topic, found, f"Not refused; {_variable(name)} should be alike.")
    for name, mine, theirs in _unequal(meeting.versions, seen.versions):
        found = f"{name} is {mine} here and {theirs} on rack {rack}."
        change = "Racks with another minor version of torch refuse each other; use one everywhere."
        yield remark(topic, found, change)


def _unequal(mine: dict[str, str], theirs: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys((*mine, *theirs)):
        one, other = mine.get(name, "unknown"), theirs.get(name, "unknown")
        if one != other and "" not in (one, other):  # empty: not known at this time
            yield name, one, other


_VARIABLES = {
    "tau": "MEND_OVERLAP_STEPS",
    "outer_momentum": "MEND_OUTER_OPTIMIZER_MOMENTUM or MEND_SYNC_PERIOD_STEPS",
    "ramp_rounds": "MEND_OUTER_RAMP_ROUNDS or MEND_OUTER_START",
    "codec": "MEND_OUTER_STEP_COMPRESSION_MODE or MEND_PAYLOAD_DTYPE",
    "ranks per rack": "the ranks of every torchrun",
    "witness": "MEND_WITNESS_ADDR",
}
_OF_THE_PACKAGE = ("mend version", "wire version")


def _variable(name: str) -> str:
    return _VARIABLES.get(name, f"MEND_{name.upper()}")


# ------------------------------------------------------------------ how fast


def _of_trips(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    topic = f"rack {seen.rack}"
    if seen.p50_ms is None or seen.p99_ms is None:
        if seen.hears_us:
            found = f"No ping to rack {seen.rack} was answered, although each hears the other."
            yield remark(topic, found, "Run it again with a longer --for.")
        return
    found = f"round trip {seen.p50_ms:.2f} ms, p99 {seen.p99_ms:.2f} ms ({seen.trips} pings)"
    if seen.p99_ms > meeting.detect_ms / 4:
        wanted = round(meeting.heartbeat_ms * 4 * seen.p99_ms / meeting.detect_ms + 0.5)
        yield remark(
            topic,
            f"{found}: a rack is taken for silent after {meeting.detect_ms:.0f} ms.",
            f"Set MEND_SIDEBAND_HEARTBEAT_MS={max(wanted, 2 * meeting.heartbeat_ms)} on all racks.",
        )
    else:
        yield ok(topic, found)
    lost_pct = 100 * (1 - seen.trips / seen.asked) if seen.asked else 0.0
    if lost_pct > LOST_PCT_MAX:
        found = f"{lost_pct:.0f} % of the pings had no answer in time."
        change = "The link loses packets, or a machine was busy: look at both, and run it again."
        yield remark(topic, found, change)
    if seen.clock_ms is not None and abs(seen.clock_ms) > CLOCK_MS_MAX:
        yield remark(
            topic,
            f"its time of day is {seen.clock_ms / 1000:+.1f} s off ours.",
            "Nothing is decided by it, but logs and events of the racks cannot be laid side by "
            "side: run chrony or ntpd on both.",
        )
    elif seen.clock_ms is not None:
        yield ok(topic, f"its clock is {seen.clock_ms:+.1f} ms off ours")


def _of_flows(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
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
        found = f"Bandwidth to rack {rack} was not measured: the turns did not come to an end."
        change = "Start the doctors closer together, or with a longer --for."
        yield remark(topic, found, change)
    yield from _of_rates(meeting, seen)


def _of_rates(meeting: Meeting, seen: Seen) -> Iterator[Finding]:
    rates = [flow.mbit for flow in (seen.here, seen.there) if flow is not None and flow.mbit]
    topic = f"rack {seen.rack}"
    if len(rates) == 2 and max(rates) > SLANT * min(rates):
        yield remark(
            topic,
            f"One direction is {max(rates) / min(rates):.1f} times as fast as the other.",
            "A round waits for the slower one. Look for a shaper, a slower card, losses one way "
            "(`nstat -az TcpRetransSegs`), or other traffic.",
        )
    limit = window_mbit(meeting.buffers, seen.p50_ms)
    best = max(rates, default=0.0)
    if limit is not None and seen.p50_ms is not None and best > WINDOW_SHARE * limit:
        wanted = min(WINDOW_MB_MAX, 2 ** (int(best * seen.p50_ms / 4000).bit_length() + 1))
        yield remark(
            topic,
            f"The socket buffers of this machine let {rate(limit)} through at a round trip of "
            f"{seen.p50_ms:.0f} ms; {rate(best)} came. They are the likely limit.",
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
