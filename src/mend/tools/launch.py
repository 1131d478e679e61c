"""`mend launch`: starts all racks of a job on one machine, passes their lines on, and ends them.

Each rack is a torchrun of its own, so that one rack can die alone.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path

from mend.config.keyfile import read_secrets
from mend.config.kinds import JOB
from mend.config.settings import check_environment
from mend.config.sources import DIAGNOSTICS_DIR, INSECURE, KEY_FILE, METRICS_PORT, OUTCOMES
from mend.config.topology import RACKS
from mend.consensus.records import EVICTIONS_MAX
from mend.engine.state.outcome import KEPT, RankEnd, read_ended
from mend.errors import ConfigError, require
from mend.tools.begun import Begun
from mend.tools.keys_command import create
from mend.tools.links import Link, Net, links
from mend.tools.ports import LOOPBACK, free_ports
from mend.tools.processes import (
    RESTART,
    TOKEN,
    Child,
    Interrupts,
    Sink,
    kill_orphans,
    orphans,
    separate_script,
)

POLL_S = 0.05
WITNESS_EXIT_S = 5.0
"""The witness has this long to see that all racks left, and as long again after SIGTERM; then it is
killed."""

END_S = 10.0
"""Seconds that racks have to end where the job can never begin; then they are killed."""

UNMERGED_EXIT = 3
"""A rack that ended in order, with work that nobody merged. It is not started again: what it has
is in its weights, and another life would begin without."""

WITNESS_NAME = "witness"
UNTRAINED = (
    "no rack counted a step, so the model is as it began: call optimizer.step() or runtime.step() "
    "in the loop; is the data empty?"
)
NOBODY_JOINED = "call mend_init in the script: no rack has, so the racks exchanged nothing"

JOB_ID = "MEND_JOB_ID"
LEAVE_OUT = "Leave it out of --env."

PLAIN = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0"},  # any port will do for a group of one
}
"""Variables that torchrun sets for a rack of one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job to start. `command` is `script.py args...` or `-m module args...`."""

    command: tuple[str, ...]
    racks: int = 2
    nproc_per_rack: int = 1
    ranks_by_rack: tuple[int, ...] = ()
    """Processes of each rack, where they have different numbers; in place of nproc_per_rack."""
    witness: bool = True
    job_id: str = ""
    """Empty: drawn."""
    base_port: int = 0
    log_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    """Most times that a rack that failed is started again; it then joins the running job. An
    evicted rack is started again whatever this says: the job has asked for it."""
    torchrun: bool = True
    """False: racks, of one process each, are started without it, which takes seconds less."""
    link: str | None = None
    """RATE[,ROUND TRIP[,LOSS]]: each rack in a network namespace of its own; None: loopback."""

    def __post_init__(self) -> None:
        if len(self.sizes) != self.racks or min(self.sizes) < 1:
            rule = f"must give each of the {self.racks} racks a number, at least 1"
            remedy = "Use one number for all racks, or one for each, as 2,4."
            raise ConfigError("--nproc-per-rack", ",".join(map(str, self.sizes)), rule, remedy)
        try:
            JOB.accept(self.job_id or "drawn")
        except ValueError:
            remedy = "Leave it out for a random name."
            raise ConfigError("--job-id", self.job_id, f"needs {JOB.rule}", remedy) from None
        self._check_env()
        if self.base_port and not 1024 <= self.base_port <= 65535 - self.racks:
            rule = "must be 0 or 1024..65535 - racks"
            remedy = "0 picks free ports."
            raise ConfigError("--base-port", self.base_port, rule, remedy)
        if self.link is not None:
            Link.to_make(self.link)

    def _check_env(self) -> None:
        """Raise ConfigError if --env would give the racks another job than the witness has."""
        for name, option, own in (
            (JOB_ID, "--job-id", self.job_id),
            (RACKS, "--racks", self.racks),
        ):
            given = self.env.get(name, "").strip()
            if given and str(own) not in ("", given):
                raise ConfigError(
                    f"--env {name}", given, f"must be that of {option}, {own}", LEAVE_OUT
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Processes of each rack."""
        return self.ranks_by_rack or (self.nproc_per_rack,) * self.racks

    def named(self) -> Job:
        """Return it with a name: that of --job-id or --env, else a random one."""
        given = self.job_id or self.env.get(JOB_ID, "").strip()
        return replace(self, job_id=given or f"job-{os.urandom(4).hex()}")


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """Exit codes as subprocess gives them (negative: the signal), of a rack its last life's.

    `interrupted`: a signal, or 0. `culprit`: the rack on account of which all others were ended.
    `unmerged`: what racks reported that ended with unmerged work. `untrained`: there was no work.
    """

    racks: dict[int, int]
    witness: int | None
    interrupted: int = 0
    culprit: int | None = None
    unmerged: Mapping[int, RankEnd] = field(default_factory=dict)
    untrained: bool = False

    @property
    def status(self) -> int:
        """The interrupt's, else the culprit's, else that of the first rack that failed, else the
        witness's. Of a rack that reported unmerged work and did not crash, and of a job without
        a step: UNMERGED_EXIT."""
        codes = [
            -self.interrupted,
            self.racks[self.culprit] or 1 if self.culprit is not None else 0,
            *(self._code(rack) for rack in sorted(self.racks)),
            self.witness or 0,
            UNMERGED_EXIT if self.untrained else 0,
        ]
        first = next((code for code in codes if code), 0)
        return 128 - first if first < 0 else first

    def _code(self, rack: int) -> int:
        code, ended_as = self.racks[rack], self.unmerged.get(rack)
        if ended_as is not None and (code == 0 or (code == 1 and ended_as.outcome in KEPT)):
            return UNMERGED_EXIT
        return code


def make_log_dir(folder: Path) -> None:
    """Make the folder. Raises ConfigError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made ({error.strerror})"
        raise ConfigError(
            "--log-dir", str(folder), rule, "Name one that may be written."
        ) from error


# ------------------------------------------------------------------ environment


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the names for CUDA_VISIBLE_DEVICES: from the variable itself, else from nvidia-smi."""
    if (listed := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [
            name.strip()
            for name in listed.split(",")
            if name.strip() not in ("", "-1", "NoDevFiles")
        ]
    asked = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip().isdigit()]


def gpus_by_rack(gpus: list[str], job: Job) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES per rack: equal shares, None without GPUs. Raises ConfigError."""
    if not gpus:
        return [None] * job.racks
    needed, sizes = sum(job.sizes), "+".join(map(str, job.ranks_by_rack))
    if len(gpus) < needed:
        racks = sizes or f"{job.racks} racks x {job.nproc_per_rack}"
        raise ConfigError(
            "gpus",
            ",".join(gpus),
            f"{racks} processes need {needed} GPUs",
            "Lower --racks or --nproc-per-rack, or run on CPU with CUDA_VISIBLE_DEVICES= (empty).",
        )
    share = len(gpus) // job.racks
    shares = job.ranks_by_rack or (share,) * job.racks
    ends = [*accumulate(shares, initial=0)]
    return [",".join(gpus[first:end]) for first, end in pairwise(ends)]


def rack_environments(
    job: Job,
    environ: Mapping[str, str],
    ports: list[int],
    gpus: list[str],
    hosts: Sequence[str] = (),
) -> list[dict[str, str]]:
    """The environment of each rack. `ports`: one per rack, the witness's last. --env wins.

    `hosts` go with the ports; left out, all of them are this machine's loopback interface.
    """
    hosts = hosts or [LOOPBACK] * len(ports)
    addresses = [f"tcp://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    shared = {
        RACKS: str(job.racks),
        JOB_ID: job.job_id,
        "MEND_SIDEBAND_PEERS": ",".join(f"{rack}={addresses[rack]}" for rack in range(job.racks)),
        "PYTHONUNBUFFERED": "1",
    }
    if job.ranks_by_rack:
        shared["MEND_RANKS_BY_RACK"] = ",".join(map(str, job.ranks_by_rack))
    if job.witness:
        shared["MEND_WITNESS_ADDR"] = addresses[job.racks]
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    # As many threads in all as there are cores; more only make each other wait.
    threads = {"OMP_NUM_THREADS": str(max(1, cores // sum(job.sizes)))}
    environments = []
    for rack, devices in enumerate(gpus_by_rack(gpus, job)):
        own = {"MEND_RACK": str(rack), "MEND_SIDEBAND_ADDR": addresses[rack]}
        if hosts[rack] != LOOPBACK:
            own["MEND_ADVERTISE_HOST"] = hosts[rack]  # whatever the shell has is of another network
        if devices is not None:
            own["CUDA_VISIBLE_DEVICES"] = devices
        inherited = {
            key: value
            for key, value in environ.items()
            if job.witness or key != "MEND_WITNESS_ADDR"
        }
        environment = {**threads, **inherited, **shared, **own, **job.env}
        environments.append({**environment, **metrics_variables(environment, rack)})
    return environments


def is_untrained(ends: Sequence[RankEnd]) -> bool:
    """Whether a job ended in order, and not one rank counted a step."""
    return bool(ends) and all(each.outcome == "merged" and not each.step for each in ends)


def next_step(environ: Mapping[str, str]) -> str:
    """What to do after a job that ended in order. `environ`: of its ranks."""
    if folder := environ.get(DIAGNOSTICS_DIR, ""):
        return f"mend report {folder}"
    return f"--env {DIAGNOSTICS_DIR}=FOLDER records a run, and mend report FOLDER draws it"


def metrics_variables(environ: Mapping[str, str], place: int) -> dict[str, str]:
    """The variable of a process of its own port for metrics: the given one and `place`, so that
    processes of one machine do not take each other's. Empty: none is given."""
    given = environ.get(METRICS_PORT, "").strip()
    served = given.isdecimal() and int(given) > 0
    return {METRICS_PORT: str(int(given) + place)} if served else {}


def inner_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that let ranks meet on loopback: a namespace has no name of the machine."""
    return {name: environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


def torchrun_command(job: Job, rack: int, restart: int = 0) -> list[str]:
    """One life of a rack: a torchrun with a rendezvous of its own on a port that it picks.

    It never restarts its workers itself: they would meet in the store of their former life, where
    gloo finds the addresses of the dead and waits for them.
    """
    return [
        *(sys.executable, "-m", "mend.tools.torchrun"),
        "--max-restarts=0",
        *("--nnodes", "1", "--nproc-per-node", str(job.sizes[rack])),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:0"),
        *("--rdzv-id", f"{job.job_id}-rack{rack}-{restart}"),
        *separate_script(job.command),
    ]


def plain_command(job: Job) -> list[str]:
    """One rack of one process; `PLAIN` has the rest of what torchrun would tell it."""
    return [sys.executable, *job.command]


def witness_command(job: Job, port: int, host: str = LOOPBACK) -> list[str]:
    return [
        sys.executable, "-m", "mend.tools", "coordinate", "--bind", f"tcp://{host}:{port}",
        "--racks", str(job.racks), "--job-id", job.job_id,
    ]  # fmt: skip


# ------------------------------------------------------------------ processes


class Launch:
    """One run of a job, from start to the last process's end."""

    def __init__(self, job: Job, sink: Sink) -> None:
        # An empty one is not set: it must not take what the launch gives from the racks.
        own = {KEY_FILE, JOB_ID, RACKS}
        given = {name: text for name, text in job.env.items() if name not in own or text.strip()}
        self.job, self._sink = replace(job, env=given), sink
        self._token, self._interrupts = os.urandom(8).hex(), Interrupts()
        self.racks: list[Child] = []
        """The newest life of each."""
        self.witness: Child | None = None
        self.culprit: int | None = None
        self._reason, self._kill_s = "", 0.0
        self._restarts = [0] * job.racks
        self._evictions = [0] * job.racks
        """Restarts of racks that the job had evicted."""
        self._environments: list[dict[str, str]] = []
        self._addresses: list[str] = []
        self._net: Net | None = None
        self._outcomes = Path()
        """Folder in which ranks tell how they ended."""
        self._keys = Path()
        """Folder of a key that is made for this job alone."""
        self._key_file: Path | None = None
        self._secrets: tuple[bytes, ...] = ()

    def run(self) -> LaunchResult:
        """Start everything, pass lines and signals on, return when nothing of it is left."""
        with (
            self._interrupts.caught(asked=True),
            self._network(),
            tempfile.TemporaryDirectory() as outcomes,
            tempfile.TemporaryDirectory(prefix="mend-key-") as keys,
        ):
            self._outcomes, self._keys = Path(outcomes), Path(keys)
            try:
                self._start()
                self._watch_racks()
                self._end_witness()
            finally:
                # Also after a bug of ours: no process outlives the launch.
                kill_orphans(self._token)
                for child in self._children():
                    child.signal(signal.SIGKILL)
                    child.close()
            unmerged, joined = self._find_unmerged(), any(self._outcomes.iterdir())
            untrained = is_untrained(read_ended(self._outcomes))
        codes = {rack: child.process.returncode for rack, child in enumerate(self.racks)}
        if (rack := self.culprit) is not None:
            self._say(f'not-begun rack={rack} exit={codes[rack]} reason="{self._reason}"')
        for rack, ended_as in sorted(unmerged.items()):
            self._say(f'unmerged rack={rack} outcome={ended_as.outcome} why="{ended_as}"')
        if untrained:
            self._say(f'untrained why="{UNTRAINED}"')
        witness = self.witness.process.returncode if self.witness is not None else None
        outcome = LaunchResult(
            codes, witness, self._interrupts.first, self.culprit, unmerged, untrained
        )
        if not outcome.status:
            step = next_step(self._environments[0]) if joined else NOBODY_JOINED
            self._say(f'next="{step}"')
        return outcome

    def _find_unmerged(self) -> dict[int, RankEnd]:
        """Return by rack its first rank whose work was not merged, reported by its newest life."""
        ended_as = [ended for ended in read_ended(self._outcomes) if not ended.good]
        return {ended.rack: ended for ended in reversed(ended_as)}

    @contextmanager
    def _network(self) -> Iterator[None]:
        """Make the network that the job asks for, if any, and remove it on the way out."""
        if self.job.link is None:
            yield
            return
        racks, witness = self.job.racks, self.job.witness
        asked = Link.parse(self.job.link)
        with links(asked, racks=racks, witness=witness, say=self._say) as self._net:
            yield

    def _children(self) -> list[Child]:
        return [*self.racks, *([self.witness] if self.witness is not None else [])]

    def _start(self) -> None:
        job = self.job
        environ = {**os.environ, TOKEN: self._token}
        environ |= self._key_variables({**environ, **job.env})
        gpus = visible_gpus({**environ, **job.env})
        ports = free_ports(job.racks + int(job.witness), job.base_port)
        hosts, net = [LOOPBACK] * len(ports), self._net
        if net is not None:
            hosts = list(net.hosts)
            environ |= inner_interfaces(environ)
        self._environments = rack_environments(job, environ, ports, gpus, hosts)
        self._addresses = [f"tcp://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        if job.log_dir is not None:
            make_log_dir(job.log_dir)
        processes = ",".join(map(str, job.ranks_by_rack or (job.nproc_per_rack,)))
        self._say(
            f"started job={job.job_id} racks={job.racks} nproc_per_rack={processes} "
            f"witness={'yes' if job.witness else 'no'} ports={','.join(map(str, ports))}"
        )
        inside = net.sites[-1].prefix if net is not None else ()
        key = (f"{KEY_FILE}={self._key_file}",) if self._key_file is not None else ()
        watch = " ".join((*key, *inside, "mend", "top", f"tcp://{hosts[-1]}:{ports[-1]}"))
        self._say(f'watch="{watch}"')
        if job.witness:
            command = witness_command(job, ports[-1], hosts[-1])
            unbuffered = {**environ, **job.env, "PYTHONUNBUFFERED": "1"}
            unbuffered |= metrics_variables(unbuffered, job.racks)
            self.witness = self._child(WITNESS_NAME, command, unbuffered, len(hosts) - 1)
        for rack in range(job.racks):
            self.racks.append(self._start_rack(rack))

    def _key_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return variables that name the key: that of the user, or one for this job alone."""
        insecure = environ.get(INSECURE, "").strip().lower()
        if insecure not in ("", "0", "false", "no", "off"):
            return {}
        named = environ.get(KEY_FILE, "").strip()
        self._key_file = Path(named) if named else self._keys / "key"
        if not named:
            create(self._key_file, (secrets.token_bytes(32),))
        self._secrets = read_secrets(self._key_file)
        return {KEY_FILE: str(self._key_file)}

    def _start_rack(self, rack: int) -> Child:
        job, restart = self.job, self._restarts[rack]
        environment = {**self._environments[rack], RESTART: str(restart)}
        environment[OUTCOMES] = str(self._outcomes)
        for former in self._outcomes.glob(f"rack{rack}-*"):
            former.unlink()
        command = torchrun_command(job, rack, restart)
        if not job.torchrun:
            command, environment = plain_command(job), {**environment, **PLAIN, **job.env}
        return self._child(f"rack {rack}", command, environment, rack, again=restart > 0)

    def _child(
        self, name: str, command: list[str], env: Mapping[str, str], site: int, again: bool = False
    ) -> Child:
        if self._net is not None:
            command = [*self._net.sites[site].prefix, *command]
        folder = self.job.log_dir
        log = folder / f"{name.replace(' ', '')}.log" if folder is not None else None
        return Child(name, command, env, self._sink, log, again=again)

    def _say(self, line: str) -> None:
        self._sink("launch", line)

    def _watch_racks(self) -> None:
        seen = asked = 0
        with closing(Begun(self._secrets)) as begun, closing(Begun(self._secrets)) as late:
            while not all(child.reported for child in self.racks):
                time.sleep(POLL_S)
                # Read once: a signal that comes while the first is passed on counts as the second.
                count = self._interrupts.count
                if count > seen:
                    self._pass_signal(kill=count > 1)
                    seen = count
                if self._interrupts.asked > asked:
                    asked = self._interrupts.asked
                    self._say("signal=SIGUSR1 to=all-racks")
                    for child in self.racks:
                        child.ask(signal.SIGUSR1)
                self._poll_children()
                self._end_what_cannot_begin(begun)
                self._end_what_came_too_late(late)

    def _pass_signal(self, *, kill: bool) -> None:
        """The first signal goes to the racks; the witness stays, as they may need it to leave."""
        number = signal.SIGKILL if kill else signal.Signals(self._interrupts.first)
        again = "" if kill else " (once more to kill them)"
        self._say(f"signal={number.name} to=all-racks{again}")
        self._signal(range(len(self.racks)), number)
        if kill:
            kill_orphans(self._token)

    def _poll_children(self) -> None:
        """Pass lines on; report who has ended, and kill what it left behind."""
        for child in self._children():
            ended = not child.running()  # asked first, so that its last lines are read
            child.read()
            if not ended or child.reported:
                continue
            child.reported = True
            rack = self.racks.index(child) if child in self.racks else None
            left = kill_orphans(self._token, rack) if rack is not None else 0
            child.close()
            again = rack is not None and self._may_restart(rack)
            if rack is not None and again:
                self._restarts[rack] += 1
                self._evictions[rack] += bool(self._put_out(rack))
            self._report(child, left, rack if again else None)
            if rack is not None and again:
                self._start_again(rack)

    def _start_again(self, rack: int) -> None:
        """Start its next life. If the machine has no room for a process, the others train on."""
        try:
            self.racks[rack] = self._start_rack(rack)
        except OSError as error:
            self._say(f'rack {rack} not-restarted reason="{error.strerror}"')

    def _has_failed(self, rack: int) -> bool:
        ended_as = self._find_unmerged().get(rack)
        kept = ended_as is not None and ended_as.outcome in KEPT  # its weights are the only copy
        return not kept and self.racks[rack].process.returncode not in (None, 0, UNMERGED_EXIT)

    def _put_out(self, rack: int) -> str:
        """Return how its newest life was put out of the job, to be started again: evicted, as it
        was slow, or seat-lost, as it was silent for too long. Empty: it was not."""
        ended_as = [ended.outcome for ended in read_ended(self._outcomes) if ended.rack == rack]
        return next((word for word in ended_as if word in ("evicted", "seat-lost")), "")

    def _has_lives(self, rack: int) -> bool:
        """Return whether a rack that ended so is started again, if others are left."""
        if self._put_out(rack):
            return self._evictions[rack] < EVICTIONS_MAX
        tries = self._restarts[rack] - self._evictions[rack]
        return self._has_failed(rack) and tries < self.job.max_restarts

    def _may_restart(self, rack: int) -> bool:
        """Return whether to start a rack again that has ended. The new life tells the others that
        the former one is over, so nothing of that may be left. False if there is nobody to join."""
        if not self._has_lives(rack) or self._interrupts.count or self.culprit is not None:
            return False
        others = [r for r in range(self.job.racks) if r != rack]
        awaited = [r for r in others if self.racks[r].running() or self._has_lives(r)]
        return bool(awaited or not others) and not orphans(self._token, rack)

    def _report(self, child: Child, orphans_killed: int, again: int | None) -> None:
        """`again`: the rack that is started again now."""
        code = child.process.returncode
        notes = [f"exit={code}"]
        if code < 0:
            with suppress(ValueError):  # most real-time signals have no name
                notes.append(f"signal={signal.Signals(-code).name}")
        if orphans_killed:
            notes.append(f"orphans_killed={orphans_killed}")
        if again is not None and self._put_out(again):
            restarts = f"{self._evictions[again]}/{EVICTIONS_MAX}"
            notes.append(f"restart={self._put_out(again)} {restarts}")
        elif again is not None:
            tries = self._restarts[again] - self._evictions[again]
            notes.append(f"restart={tries}/{self.job.max_restarts}")
        others = [rack for rack, other in enumerate(self.racks) if other.running()]
        if code and others:
            notes.append(f"still_running={','.join(map(str, others))}")
        self._say(f"{child.name} ended {' '.join(notes)}")

    # -------------------------------------------------------------- a job that cannot begin

    def _end_what_cannot_begin(self, begun: Begun) -> None:
        """A permanently failed rack before the job has begun ends all: nobody can begin without
        it, and nobody will put it right. The others would wait for `start_timeout_s`."""
        running = [rack for rack, child in enumerate(self.racks) if child.running()]
        if self.culprit is not None:
            if time.monotonic() > self._kill_s:
                self._signal(running, signal.SIGKILL)
            return
        failed = [
            r for r in range(self.job.racks) if self.racks[r].reported and self._has_failed(r)
        ]
        if not failed or not running or self._interrupts.count:
            return
        witness = self.witness is not None and self.witness.running()
        if not begun.never([self._addresses[each] for each in ([-1] if witness else running)]):
            return
        reason = begun.refused(failed[0]) or "see its own lines"
        self._end(failed[0], reason, f"rack {failed[0]} failed before the job began", running)

    def _end_what_came_too_late(self, begun: Begun) -> None:
        """Racks that were started again, and found that all others had ended meanwhile: there is
        no job to join, and too few racks to begin one. A witness tells them so itself."""
        running = [rack for rack, child in enumerate(self.racks) if child.running()]
        again = 0 < len(running) < self.job.racks and all(self._restarts[r] for r in running)
        witness = self.witness is not None and self.witness.running()
        if self.culprit is not None or witness or not again or self._interrupts.count:
            return
        if begun.never([self._addresses[each] for each in running]):
            reason = "all other racks had ended when it was started again: the job is over"
            self._end(running[0], reason, "the job is over", running)

    def _end(self, culprit: int, reason: str, why: str, running: Sequence[int]) -> None:
        self.culprit, self._kill_s, self._reason = culprit, time.monotonic() + END_S, reason
        self._say(f"{why}: ending racks={','.join(map(str, running))}")
        self._signal(running, signal.SIGTERM)

    def _signal(self, racks: Sequence[int], number: int) -> None:
        for rack in racks:
            self.racks[rack].signal(number)

    def _end_witness(self) -> None:
        """End the witness. Racks that never joined, or died, leave it waiting."""
        if self.witness is None:
            return
        all_well = all(child.process.returncode == 0 for child in self.racks)
        if not (all_well and not self._interrupts.count and self._witness_ended()):
            self.witness.signal(signal.SIGTERM)
            self._witness_ended()
        self._poll_children()

    def _witness_ended(self) -> bool:
        limit = time.monotonic() + WITNESS_EXIT_S
        witness = require(self.witness, "there is no witness")
        while witness.running() and time.monotonic() < limit:
            time.sleep(POLL_S)
            self._poll_children()
        return not witness.running()


def check_script(script: str) -> None:
    """A file, a folder with a __main__.py, or -m for a module. Raises ConfigError."""
    path = Path(script)
    if script != "-m" and not path.is_file() and not (path / "__main__.py").is_file():
        rule = "is a folder without __main__.py" if path.is_dir() else "there is no such file"
        raise ConfigError("SCRIPT", script, rule, "Name the script; -m takes a module.")


def launch(job: Job, sink: Sink) -> LaunchResult:
    """Run a job to its end. Main thread only: signals arrive there, and children die with it.

    Raises ConfigError (no such script, an unknown MEND_* variable, too few GPUs), AddressInUse
    (--base-port), LinkError (--link).
    """
    check_script(job.command[0])
    check_environment({**os.environ, **job.env})
    return Launch(job.named(), sink).run()
