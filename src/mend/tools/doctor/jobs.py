"""Looks for jobs at the addresses where the racks would meet, as `mend top` does.

The doctor sends nothing else before that: a running job must not be disturbed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from mend.config.keyfile import secrets_in_force
from mend.config.settings import MendConfig
from mend.errors import AddressInUse, ConfigError, WireError
from mend.status.messages import VIEW_BYTES_MAX, JobStatus, Look, decode_view, encode_look
from mend.tools.doctor.terms import Finding, problem
from mend.transport.status_client import StatusClient, Way
from mend.types import WITNESS

LOOK_S = 1.0
ASKED_APART_S = 0.25

OF_A_MEETING = "-doctor"
"""How the names of the jobs of meetings end."""

NAME_CHARS_MAX = 64
"""Of a job's name."""

STOP_IT = (
    "The racks meet where the job would run: stop it first, or choose other ports. `mend top` "
    "looks at a job while it runs."
)


def meeting_of(job: str) -> str:
    """The name of the job in which the racks of `job` meet: another one, so that neither is taken
    for the other."""
    name = job + OF_A_MEETING
    if len(name) <= NAME_CHARS_MAX:
        return name
    digest = hashlib.sha256(job.encode()).hexdigest()[:12]
    return f"{job[: NAME_CHARS_MAX - len(digest) - len(OF_A_MEETING)]}{digest}{OF_A_MEETING}"


@dataclass(frozen=True, slots=True)
class Looks:
    """What was seen at some addresses.

    views: what answers as a process of a job; clocks_ns: by how much its time of day is ahead.
    speaking: something speaks as mend does, and answers nothing if it is a job with observe=False.
    locked: it has another key, or one of the two sides has none.
    """

    views: dict[str, JobStatus] = field(default_factory=dict)
    clocks_ns: dict[str, int] = field(default_factory=dict)
    speaking: frozenset[str] = frozenset()
    locked: frozenset[str] = frozenset()

    def then(self, newer: Looks) -> Looks:
        """What was seen up to and with `newer`."""
        return Looks(
            self.views | newer.views,
            self.clocks_ns | newer.clocks_ns,
            self.speaking | newer.speaking,
            self.locked | newer.locked,
        )


def jobs_at(addresses: Sequence[str], limit_s: float = LOOK_S, *, proxy: str = "") -> Looks:
    """Ask all addresses until each has answered, `limit_s` at most; with a SOCKS5 `proxy` through
    that as well."""
    views: dict[str, JobStatus] = {}
    clocks_ns: dict[str, int] = {}
    with closing(StatusClient(VIEW_BYTES_MAX, secrets_in_force(), proxy)) as onlooker:
        known = [address for address in addresses if _watch(onlooker, address)]
        end, question = time.monotonic() + limit_s, encode_look(Look(""))
        while (left_s := end - time.monotonic()) > 0 and len(views) < len(set(known)):
            for address in known:
                if address not in views:
                    onlooker.ask(address, question)
            for address, frame in onlooker.collect(min(ASKED_APART_S, left_s)):
                with suppress(WireError):
                    views[address] = decode_view(frame)
                    clocks_ns[address] = views[address].wall_ns - time.time_ns()
        ways = {each: onlooker.way(each) for each in known}
    of_another_key = (Way.LOCKED, Way.HUNG_UP)
    locked = frozenset(each for each in known if ways[each] in of_another_key) - views.keys()
    speaking = frozenset(each for each in known if ways[each] in (Way.SPEAKS, Way.LOCKED))
    return Looks(views, clocks_ns, speaking | views.keys(), locked)


def _watch(onlooker: StatusClient, address: str) -> bool:
    """False: it is not an address, which the meeting will report."""
    try:
        onlooker.watch(address)
    except ConfigError:
        return False
    return True


def look_around(config: MendConfig) -> list[Finding]:
    """Jobs at the addresses of all racks, and whose witness it is."""
    racks = tuple(config.peer_addresses.values())
    wanted = (*racks, config.witness_addr) if config.witness_addr else racks
    return list(of_jobs(jobs_at(wanted, proxy=config.socks_proxy).views, config.job_id))


def of_jobs(views: Mapping[str, JobStatus], job: str) -> Iterator[Finding]:
    """Racks that train are problems; a witness may be there before the job, if it is ours."""
    for address, view in views.items():
        if view.rack == WITNESS and view.job != job:
            found = f"The witness at {address} is of job {view.job!r}; this rack has {job!r}."
            change = "Start `mend coordinate` with this --job-id, or set MEND_JOB_ID alike."
            yield problem("witness", found, change)
        elif view.rack != WITNESS and not view.job.endswith(OF_A_MEETING):
            yield problem(f"rack {view.rack}", _describe(view, address), STOP_IT)


def _describe(view: JobStatus, address: str) -> str:
    state = f"{view.state}, {view.commits} rounds committed"
    return f"A job is running: rack {view.rack} of job {view.job!r} at {address} ({state})."


def of_taken(error: AddressInUse) -> Finding:
    """Another process has a port; the error names it."""
    change = "Stop it, or choose another port."
    if error.lane:  # of the data ports; the sideband's comes after it
        change = "Give MEND_DATA_PORTS a wider range, or end what holds these (`ss -ltnp`)."
    return problem("this rack", str(error), change)
