"""Starts racks as processes, waits for what they do, and never leaves one behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

from mend.tools.processes import TOKEN, kill_orphans
from mend.types import WITNESS

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 120.0
"""Longer than anything here takes on a slow machine; reaching it is a failure. pytest ends a test
after twice as long."""

READ_BYTES = 1 << 16
WAITING_MAX = 64
"""Processes that ask the nursery at once, while it loads torch."""

POLL_S = 0.01

T = TypeVar("T")

CHANGES = ("age_silence", "break_rule", "find")
"""Acts of train.py that change the machines themselves, which no tape has."""

START_GATE = "START_GATE"
"""In the environment: the file with which a start times out, whatever the settings say."""


def until(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Wait for something that another process does. `what`: a function is asked at the end."""
    limit = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() >= limit:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"in {LIMIT_S} s not: {told}")
        time.sleep(POLL_S)


EXACT = {"MEND_CODEC": "float32", "MEND_SYNC_PERIOD_STEPS": "128"}
"""Of tests that do not say otherwise: payloads that lose nothing, and no round that they do not ask
for."""


def environment(**more: str) -> dict[str, str]:
    """What every process of a test has: no MEND_* of who runs it but EXACT, one thread per
    torch."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MEND_")}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **kept,
        **single,
        **EXACT,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # for Job.stacks
        **more,
    }


def run_module(python: str, module: str, *arguments: object, **env: str) -> tuple[int, str]:
    """`python -m module arguments...` to its end: its exit status, and all that it said."""
    done = subprocess.run(
        [python, "-m", module, *map(str, arguments)], cwd=ROOT,
        env=environment(**{"COLUMNS": "200", **env}), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def run_mend(nursery: Nursery, *arguments: object) -> tuple[int, str]:
    return run_module(nursery.python, "mend.tools", *arguments)


class Nursery:
    """This side of `tests.process.nursery`. `folder` is short: a socket's path has a limit."""

    def __init__(
        self, folder: Path, python: Sequence[str] = (sys.executable,), tests: Sequence[str] = ()
    ) -> None:
        """`python`: what starts the nursery. `tests`: what its forks find imported besides."""
        self._address = folder / "nursery"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(self._address))
            door.listen(WAITING_MAX)
            self._process = subprocess.Popen(
                [*python, "-m", "tests.process.nursery", str(door.fileno()), *tests], cwd=ROOT,
                env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                pass_fds=[door.fileno()],
            )  # fmt: skip
        self.python = str(folder / "python")
        """An interpreter that is forked instead of started, and so is what it starts. For whatever
        is not about a process's own start."""
        words = shlex.join(self.command(self.python))
        torchrun = f"{self.python} -m torch.distributed.run"
        for script, line in (("python", words), ("torchrun", torchrun)):
            (folder / script).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            (folder / script).chmod(0o755)
        self._born: list[int] = []
        self._text = b""
        self._used: list[tuple[int, float]] = []
        self.codes: dict[int, int] = {}
        """Exit code of every process that ended, as subprocess gives it."""

    def command(self, name: str) -> list[str]:
        """What stands for a `python` that is forked, with `name` as its interpreter."""
        warm = [sys.executable, "-IS", str(ROOT / "tests/process/warm.py")]
        return [*warm, sys.executable, str(self._address), name]

    def fork(
        self, argv: list[str], env: dict[str, str], log: Path, whole: bool, namespace: str = ""
    ) -> int:
        """Start `python -m argv...`; returns its process id. `whole`: its end, too, is that of an
        interpreter. `namespace`: of the network in which it runs."""
        request = {"argv": ["-m", *argv], "env": env, "log": str(log), "whole": whole}
        return self._ask({**request, "namespace": namespace}, self._born)

    def usage(self) -> tuple[int, float]:
        """The most processes that lived at once and the CPU seconds of those that ended, since the
        last call."""
        return self._ask({}, self._used)

    def _ask(self, request: dict[str, Any], answers: list[T]) -> T:
        """`answers`: where `listen` puts what comes back."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

        def answered() -> bool:
            self.listen(0.1)
            return bool(answers)

        until(answered, "the nursery answers")
        return answers.pop()

    def listen(self, limit_s: float) -> None:
        """Take in what the nursery has said; wait for it up to the limit."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            return
        chunk = os.read(self._process.stdout.fileno(), READ_BYTES)
        assert chunk, f"the nursery ended: {self._process.wait()}"
        *lines, self._text = (self._text + chunk).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "peak" in said:
                self._used.append((said["peak"], said["cpu_s"]))
            elif "pid" in said:
                self._born.append(said["pid"])
                self.codes.pop(said["pid"], None)  # an old process had this id
            else:
                self.codes[said["ended"]] = said["code"]

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


class Forked:
    """A process of the nursery. `code` is None while it runs."""

    def __init__(
        self, nursery: Nursery, argv: list[str], env: dict[str, str], log: Path, *,
        whole: bool = False, namespace: str = "",
    ) -> None:  # fmt: skip
        self.nursery, self.log = nursery, log
        self.pid = nursery.fork(argv, env, log, whole, namespace)

    @property
    def code(self) -> int | None:
        self.nursery.listen(0)
        return self.nursery.codes.get(self.pid)

    def signal(self, number: signal.Signals) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and that is not told yet
                os.kill(self.pid, number)

    def wait(self) -> int:
        until(lambda: self.code is not None, f"the process with {self.log} ends")
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()


class Siblings:
    """A rack of several ranks, as torchrun would start them, but in milliseconds."""

    def __init__(
        self,
        nursery: Nursery,
        argv: list[str],
        ranks: int,
        env: dict[str, str],
        log: Path,
        port: int,
        *,
        whole: frozenset[int] = frozenset(),
        namespaces: Sequence[str] = (),
    ) -> None:
        """`whole`: the ranks that end as an interpreter does. `namespaces`: of each rank."""
        namespaces = namespaces or [""] * ranks
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        meeting = {"MASTER_ADDR": "127.0.0.1", **env, "MASTER_PORT": str(port)}
        self.log = log
        self.ranks = [
            Forked(
                nursery, argv,
                {**env, **world, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                log.with_suffix(f".{rank}.log"), whole=rank in whole, namespace=namespaces[rank],
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self.pid = self.ranks[0].pid

    @property
    def code(self) -> int | None:
        """Of the first that failed; None while one runs and none has."""
        codes = [rank.code for rank in self.ranks]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        return None if None in codes else 0

    def signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def wait(self) -> int:
        return max((rank.wait() for rank in self.ranks), key=abs)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


class Torchrun:
    """A rack of several ranks, as users start it."""

    def __init__(
        self, nursery: Nursery, argv: list[str], ranks: int, env: dict[str, str], log: Path
    ) -> None:
        self.log, self._token = log, os.urandom(8).hex()
        command = [nursery.python, "-m", "torch.distributed.run", "--standalone"]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "--nproc-per-node", str(ranks), "-m", *argv], cwd=ROOT, stdout=out,
                stderr=subprocess.STDOUT, env={**env, TOKEN: self._token}, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(LIMIT_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        kill_orphans(self._token)


class Result:
    """What a rank wrote when it ended: see train.py for the keys."""

    def __init__(self, told: dict[str, Any], events: list[dict[str, Any]]) -> None:
        self.events = events
        self.losses: list[str] = told.get("losses", [])
        self.weights: dict[str, list[int]] = told.get("weights", {})
        self.status: dict[str, Any] = told.get("status", {})
        self.before_shutdown: dict[str, Any] = told.get("before_shutdown", {})
        self.error: list[str] = told.get("error", [])
        self.threads: list[str] = told.get("threads", [])

    @property
    def digest(self) -> str:
        return str(self.status["anchor_digest"])

    def kinds(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def commits(self) -> list[dict[str, Any]]:
        """The merges of the log, in its order, without the times."""
        found = self.kinds("commit")
        return [{key: event[key] for key in event if key != "time_ns"} for event in found]

    @property
    def merges(self) -> list[dict[str, Any]]:
        """The same by fragment: two runs may log fragments that are ready at once either way."""
        return sorted(self.commits, key=lambda commit: (commit["fragment"], commit["version"]))


class Whole(Enum):
    """The ranks of a job that end as an interpreter does, see `nursery.End`."""

    NONE = auto()
    ONE = auto()
    """Rank 0 of rack 0."""
    ALL = auto()


class Job:
    """Some racks, perhaps a witness, one folder. `start` what is needed, then `finish`."""

    def __init__(
        self, nursery: Nursery, folder: Path, ports: list[int], *, racks: int, ranks: int,
        witness: bool, name: str, torchrun: bool, whole: Whole = Whole.ONE,
        key_file: Path | None = None, sites: Sequence[tuple[str, str]] = (),
        settings: dict[str, str] | None = None, sizes: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`key_file`: with a key. `sites`: (network namespace, address) of every rack and of the
        witness; none: all are on the loopback interface of this machine. `settings`: MEND_* of all
        processes. `sizes`: the ranks of each rack, where they differ."""
        self._settings = settings or {}
        self.sizes = [*sizes] or [ranks] * racks
        if sizes:
            self._settings = {**self._settings, "MEND_RANKS_BY_RACK": ",".join(map(str, sizes))}
        self._whole = {
            Whole.NONE: set[tuple[int, int]](),
            Whole.ONE: {(0, 0)},
            Whole.ALL: set(itertools.product(range(racks), range(ranks))),
        }[whole]
        self._sites = [*sites] or [("", "127.0.0.1")] * (racks + 1)
        self.folder, self.racks, self.ranks, self.name = folder, racks, ranks, name
        at = zip(self._sites, ports, strict=False)
        self.addresses = [f"tcp://{host}:{port}" for (_, host), port in at]
        self._meetings, self._torchrun = ports[racks + 1 :], torchrun
        self.witness_address = self.addresses[racks] if witness else ""
        self.events_folder = folder / "events"
        self.processes: dict[int, Forked | Siblings | Torchrun] = {}
        self.witness: Forked | None = None
        self.nursery = nursery
        self.key_file = key_file
        self.unjudged = ""
        """Why its tapes are not judged, as the test damages them or leaves some out; empty: they
        are."""
        if witness:
            self.start_witness()

    def environment(self, rack: int) -> dict[str, str]:
        peers = ",".join(f"{r}={self.addresses[r]}" for r in range(self.racks))
        told = {
            "MEND_RACK": str(rack), "MEND_RACKS": str(self.racks), "MEND_JOB_ID": self.name,
            "MEND_SIDEBAND_ADDR": self.addresses[rack], "MEND_SIDEBAND_PEERS": peers,
            "MEND_DIAGNOSTICS_DIR": str(self.events_folder),
            "MEND_STALL_MAX_S": "1",  # steps take no time here, and the machine is busy
        }  # fmt: skip
        if self.witness_address:
            told["MEND_WITNESS_ADDR"] = self.witness_address
        return environment(**told, **self._settings, **self.keyed())

    def keyed(self) -> dict[str, str]:
        return {"MEND_KEY_FILE": str(self.key_file)} if self.key_file is not None else {}

    def start_witness(self, heartbeat_ms: int = 100) -> None:
        self.witness_address = self.addresses[self.racks]
        argv = [
            "mend.tools", "coordinate", "--bind", self.witness_address, "--job-id", self.name,
            "--racks", str(self.racks), "--diagnostics-dir", str(self.events_folder),
            "--heartbeat-ms", str(heartbeat_ms),
        ]  # fmt: skip
        log = self.folder / "witness.log"
        namespace = self._sites[self.racks][0]
        self.witness = Forked(
            self.nursery, argv, environment(**self._settings, **self.keyed()), log,
            namespace=namespace,
        )  # fmt: skip

    def start(
        self, rack: int, *, script: str = "tests.process.train", name: str = "",
        env: dict[str, str] | None = None, through: Sequence[str] = (),
        namespaces: Sequence[str] = (), **options: Any,
    ) -> Forked | Siblings | Torchrun:  # fmt: skip
        """`options` of train.py. `name` tells two processes of one rack apart. `through`: the
        module that runs the script, and its arguments before the script. `namespaces`: of the
        network of each rank; none: that of the rack's site."""
        who = name or f"rack{rack}"
        told = {**options, "out": str(self.folder / f"{who}-rank{{rank}}.json")}
        argv, log = [*through, script, json.dumps(told)], self.folder / f"{who}.log"
        environ = {**self.environment(rack), **(env or {})}
        acts = {name for listed in options.get("at", {}).values() for name, *_ in listed}
        if START_GATE in environ or not acts.isdisjoint(CHANGES):
            self.unjudged = "its machines do not do what their tape gives them to do"
        ranks = self.sizes[rack]
        whole = frozenset(rank for rank in range(ranks) if (rack, rank) in self._whole)
        namespace = self._sites[rack][0]
        started: Forked | Siblings | Torchrun
        if ranks > 1 and self._torchrun:
            started = Torchrun(self.nursery, argv, ranks, environ, log)
        elif ranks > 1 or len(set(self.sizes)) > 1:
            meeting = self._meetings[rack]
            started = Siblings(
                self.nursery, argv, ranks, environ, log, meeting, whole=whole,
                namespaces=namespaces or [namespace] * ranks,
            )  # fmt: skip
        else:
            started = Forked(
                self.nursery, argv, environ, log, whole=0 in whole, namespace=namespace
            )
        self.processes[rack if not name else -1 - len(self.processes)] = started
        return started

    def run(self, per: dict[int, dict[str, Any]] | None = None, **options: Any) -> list[Result]:
        """All racks with these options, but for those that `per` gives one; until all have ended
        well. Returns the results by rack, of several ranks by rack and rank."""
        for rack in range(self.racks):
            own = (per or {}).get(rack, {})
            self.start(rack, **{**options, **own})
        self.finish()
        return [self.result(r, k) for r in range(self.racks) for k in range(self.sizes[r])]

    def finish(self, *racks: int) -> None:
        """Wait until these racks, or all, have ended well."""
        for rack in racks or range(self.racks):
            self.ended(rack, code=0)

    def finished(self, *racks: int) -> list[Result]:
        """The same; returns the results of their first ranks."""
        self.finish(*racks)
        return [self.result(rack) for rack in racks or range(self.racks)]

    def ended(self, rack: int, code: int | None = None) -> int:
        """Wait for the end of a rack; its log is the message when the code is another."""
        process = self.processes[rack]
        until(lambda: process.code is not None, lambda: f"rack {rack} ends\n{self.stacks()}")
        found = process.code
        assert found is not None
        assert code is None or found == code, (
            f"rack {rack} exits {found}, not {code}\n{self.logs()}"
        )
        return found

    def kill(self, *racks: int) -> None:
        """Of all ranks by SIGKILL, and of all racks at once."""
        for rack in racks:
            self.processes[rack].signal(signal.SIGKILL)
        for rack in racks:
            self.ended(rack, code=-signal.SIGKILL)

    def bring_back(self, told: dict[str, Any], **dying: Any) -> None:
        """Rack 0, which coordinates, is killed and comes back; all end once it has made two more
        versions. `told`: options of all racks, with the gate `stop`; `dying`: more of its own."""
        for rack in range(self.racks):
            self.start(rack, **told, **({} if rack else dying))
        assert self.ended(0) != 0
        others = range(1, self.racks)
        until(lambda: any(self.events(rack, kind="takes-over") for rack in others), "a take-over")
        self.start(0, **told)
        version = self.event(0, "joined")["versions"][1]
        self.event(0, "commit", fragment=1, version=version + 2)
        Path(self.gate("stop")).touch()
        self.finish()

    def witness_ended(self) -> None:
        """It sees by itself that all racks have left."""
        witness = self.witness
        assert witness is not None
        until(lambda: witness.code is not None, "the witness leaves")
        assert witness.code == 0, self.logs()

    def result(self, rack: int, rank: int = 0, name: str = "") -> Result:
        return Result(self.told(rack, rank, name), self.events(rack, rank))

    def told(self, rack: int, rank: int = 0, name: str = "") -> dict[str, Any]:
        """The file that a script wrote at its end."""
        path = self.folder / f"{name or f'rack{rack}'}-rank{rank}.json"
        assert path.exists(), f"rack {rack} left no result\n{self.logs()}"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def errors(self, rack: int) -> list[tuple[str, str]]:
        """Type and message, of the ranks that have left a result. When one fails the launcher ends
        the others, which may be before they know."""
        paths = sorted(self.folder.glob(f"rack{rack}-rank*.json"))
        assert paths, f"no rank of rack {rack} left a result\n{self.logs()}"
        told = [json.loads(path.read_text()) for path in paths]
        return [(kind, text) for kind, text in (each["error"] for each in told if "error" in each)]

    def events(self, rack: int, rank: int = 0, *, kind: str = "") -> list[dict[str, Any]]:
        """What has been recorded so far; the line that is being written is left out. `kind`: these
        events alone, which is quick."""
        path = self.events_folder / f"events-rack{rack}-rank{rank}.jsonl"
        if not path.exists():
            return []
        *lines, _ = path.read_text().split("\n")
        begin = f'{{"kind":"{kind}"' if kind else ""
        return [json.loads(line) for line in lines if line.startswith(begin)]

    def event(self, rack: int, kind: str, /, **wanted: object) -> dict[str, Any]:
        """Wait until a rack records an event of this kind with these fields."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [
                event for event in self.events(rack, kind=kind) if wanted.items() <= event.items()
            ]
            return bool(found)

        until(there, lambda: f"rack {rack} records {kind} {wanted}\n{self.stacks()}")
        return found[0]

    def witness_event(self, kind: str, **wanted: object) -> dict[str, Any]:
        return self.event(WITNESS, kind, **wanted)

    def gate(self, name: str = "gate") -> str:
        """Where racks wait (Acts.gate) until the test makes the file."""
        return str(self.folder / name)

    def logs(self, length: int = 4000) -> str:
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-length:]}" for path in found)

    def stacks(self) -> str:
        """Abort what still runs, so that every thread says where it is; that, and the last events
        of all."""
        alive = [each for each in (*self.processes.values(), self.witness) if each is not None]
        for process in alive:
            process.signal(signal.SIGABRT)
        time.sleep(1.0)  # the last thing that a failed test does
        events = sorted(self.events_folder.glob("events-*.jsonl"))
        last = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in events]
        return "\n".join([self.logs(20000), *last])

    def close(self) -> None:
        for process in (*self.processes.values(), *([self.witness] if self.witness else [])):
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def judge(self) -> None:
        """After `close`: the simulator's questions, of the tapes of this job."""
        if self.unjudged:
            return
        from tests.process.histories import problems_in  # late: it loads torch

        problems = problems_in(self.events_folder)
        assert not problems, "\n".join([f"the tapes in {self.events_folder} say:", *problems])
