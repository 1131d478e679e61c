"""What a meeting of racks means, and what to change. Pure: measurements in, findings out;
docs/doctor.md has the list of them."""

from __future__ import annotations

from collections.abc import Iterator

from mend.tools.doctor.rates import of_flows, of_trips
from mend.tools.doctor.terms import Finding, Meeting, Seen, note, ok, problem
from mend.types import WITNESS


def of_meeting(meeting: Meeting) -> list[Finding]:
    """Everything there is to say, by rack."""
    found = list(_of_the_whole(meeting))
    for seen in meeting.peers:
        topic = f"rack {seen.rack}"
        if not (seen.heard and seen.hears_us):
            found.append(problem(topic, *_absent(meeting, seen)))
        if seen.heard:
            found += _of_settings(meeting, seen)
            found += of_trips(meeting, seen)
            found += of_flows(meeting, seen)
    return found


# ------------------------------------------------------------------ who came


def _of_the_whole(meeting: Meeting) -> Iterator[Finding]:
    met = [seen.rack for seen in meeting.peers if seen.heard and seen.hears_us]
    if meeting.racks == 1:
        yield note("meeting", "racks=1: there is nobody to meet.", "Set MEND_RACKS.")
    elif len(met) == len(meeting.peers):
        yield ok("meeting", f"all {meeting.racks} racks met in {meeting.seconds:.1f} s")
    elif met:
        named = ", ".join(map(str, met))
        yield note("meeting", f"met {len(met)} of {len(meeting.peers)} racks: {named}")
    for rack in meeting.doubles:
        yield problem(
            f"rack {rack}",
            f"Two processes say that they are rack {rack} of job {meeting.job!r}.",
            "Give every rack a MEND_RACK of its own; one doctor per rack (its local rank 0).",
        )
    for rack, job in meeting.jobs:
        who = "the witness" if rack == WITNESS else f"rack {rack}"
        yield problem(
            f"rack {rack}",
            f"A job is running: {who} of job {job!r} sent frames of a job to {meeting.address}.",
            "Doctors meet where a job would: stop the job first, or choose other ports.",
        )
    outside = [rack for rack, job in meeting.strangers if job == meeting.job]
    for rack in outside:
        yield problem(
            f"rack {rack}",
            f"Rack {rack} of this job came, but there are only {meeting.racks} here.",
            "Set MEND_RACKS alike on all racks, and number them from 0.",
        )
    if meeting.garbage:
        yield note(
            "meeting",
            f"{meeting.garbage} frames came that are neither a doctor's nor a job's.",
            "Another program, or another version of mend, sends to this port: see who.",
        )
    if meeting.witness is not None:
        yield _of_witness(*meeting.witness)


def _of_witness(address: str, answer: str, speaks: bool) -> Finding:
    if answer == "open" and speaks:
        return ok("witness", f"the witness's port answers at {address}")
    if answer == "open":
        return problem(
            "witness",
            f"What listens at MEND_WITNESS_ADDR={address} is no witness.",
            "Point MEND_WITNESS_ADDR at the --bind of `mend coordinate`.",
        )
    if answer == "refused":
        return note(
            "witness",
            f"Nothing listens at MEND_WITNESS_ADDR={address} so far; the machine answers.",
            "Start `mend coordinate` there before the job.",
        )
    return problem(
        "witness",
        f"MEND_WITNESS_ADDR={address} cannot be reached ({answer or 'not tried'}).",
        _remedy_of(answer, address),
    )


def _absent(meeting: Meeting, seen: Seen) -> tuple[str, str]:
    """Of a rack that does not hear us, or is not heard: (what is so, what to change)."""
    mine, rack, at = meeting.rack, seen.rack, seen.address
    if seen.heard:
        return (
            f"One direction fails: rack {rack} is heard here, but nothing from here reaches it "
            f"at {at} ({_told(seen)}).",
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
            f"({_told(seen)}).",
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
    return f"Rack {rack} did not come: {at} {_told(seen)}.", _remedy_of(seen.answer, at)


def _told(seen: Seen) -> str:
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
    """By far the most likely causes first."""
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
        yield note(topic, found, f"Not refused; {_variable(name)} should be alike.")
    for name, mine, theirs in _unequal(meeting.versions, seen.versions):
        found = f"{name} is {mine} here and {theirs} on rack {rack}."
        change = "Racks of different versions may join; the same one everywhere is what is tested."
        yield note(topic, found, change)


def _unequal(mine: dict[str, str], theirs: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys((*mine, *theirs)):
        one, other = mine.get(name, "unknown"), theirs.get(name, "unknown")
        if one != other and "" not in (one, other):  # empty: not known at this time
            yield name, one, other


_VARIABLES = {
    "tau": "MEND_OVERLAP_STEPS",
    "ranks per rack": "the ranks of every torchrun",
    "witness": "MEND_WITNESS_ADDR",
}
_OF_THE_PACKAGE = ("mend version", "wire version")


def _variable(name: str) -> str:
    return _VARIABLES.get(name, f"MEND_{name.upper()}")
