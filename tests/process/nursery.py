"""A process with torch loaded that forks others on request, so that a rack starts in milliseconds.

What it forks is an ordinary process with its own session, signals, environment and output file.
Talks in lines of JSON. In: {"argv", "env", "log", "whole", "namespace"}; argv is what follows
`python`, a module, a script or what multiprocessing starts; whole: see `End`; namespace: of the
network, or empty. Out: {"pid"} as the answer, {"ended", "code"} whenever one ends. In: {},
out: {"peak", "cpu_s"}, see `Forks.read`. At the end of its input it kills all.

`python -m tests.process.nursery DESCRIPTOR [TESTS...]` also listens at that socket, for `warm.py`,
with which whoever starts `python` gets a fork instead: one connection for each, see `_answer`. A
fork may be a nursery in its turn. TESTS are imported as well, for processes that run them.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import types
import weakref
from pathlib import Path
from typing import Any

READ_BYTES = 1 << 16
NURSERY = ["-m", "tests.process.nursery"]
DESCRIPTORS_MAX = 16
"""Of a client: input, output, errors, and the pipes that multiprocessing gives its children."""
CLONE_NEWNET = 0x40000000
ASKS_S = 10.0
"""A client that connects has asked within this; the machine may be slow."""


class End:
    """How a child ends. Wholly: as any other program. Else without what an interpreter does last,
    when threads and exit handlers are done: it takes its modules apart. Those are torch's, and a
    fork has to copy them for that, which takes as long as all that most racks do. Nor does torch
    take back the operators that it has registered from Python, in `weakref.finalize` of the
    nursery: three quarters of the pages that a short command copies."""

    def __init__(self) -> None:
        self.whole = True
        self._code = 1
        atexit.register(self._last)  # the first to be registered is the last to be called

    def run(self, argv: list[str]) -> None:
        if not self.whole:
            for each in [*weakref.finalize._registry]:
                each.atexit = False  # what the child itself registers is still called
        try:
            _run(argv)
            self._code = 0
        except SystemExit as left:
            self._code = left.code if isinstance(left.code, int) else int(left.code is not None)
            raise
        except KeyboardInterrupt:
            self.whole = True  # an interpreter then kills itself
            raise

    def _last(self) -> None:
        if not self.whole:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code & 0xFF)


def main() -> None:
    end, request = End(), {"argv": [*NURSERY, *sys.argv[1:]]}
    while request["argv"][:2] == NURSERY:
        _, _, door, *tests = request["argv"]
        asked = _serve(socket.socket(fileno=int(door)), tests)
        if asked is None:
            os._exit(0)
        request = asked  # in the child, far from the loop
    end.whole = request.get("whole", False)
    end.run(request["argv"])


def _run(argv: list[str]) -> None:
    """As `python argv...` does."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    if argv[0] == "-c":
        sys.argv, code = ["-c", *argv[2:]], argv[1].encode()
    else:
        sys.argv, code = argv, Path(argv[0]).read_bytes()
    script = types.ModuleType("__main__")
    script.__dict__.update(__file__=argv[0], __builtins__=builtins)
    sys.modules["__main__"] = script
    exec(compile(code, argv[0], "exec"), script.__dict__)


class Forks:
    """All that were forked and still run, and who has asked for them."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.nurseries: set[int] = set()
        """Of the running. Each ends with its own input, and then kills its forks."""
        self.asked: dict[int, socket.socket] = {}
        """pid -> its connection, of those that came by the socket."""
        self._peak, self._cpu_s = 0, 0.0

    def add(self, pid: int, argv: list[str]) -> None:
        self.running.add(pid)
        if argv[:2] == NURSERY:
            self.nurseries.add(pid)
        self._peak = max(self._peak, len(self.running))

    def read(self, lines: list[bytes]) -> list[dict[str, Any]]:
        """The requests among them. The empty one asks for the most processes that lived at once and
        the CPU seconds of those that ended, since it was last made."""
        if b"{}" in lines:
            print(json.dumps({"peak": self._peak, "cpu_s": self._cpu_s}), flush=True)
            self._peak, self._cpu_s = len(self.running), 0.0
        return [json.loads(line) for line in lines if line != b"{}"]

    def reap(self) -> None:
        while self.running:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            self._cpu_s += used.ru_utime + used.ru_stime
            self.running.discard(pid)
            self.nurseries.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if pid in self.asked:
                with self.asked.pop(pid) as client, contextlib.suppress(OSError):
                    client.sendall(b"%d\n" % code)
            else:
                print(json.dumps({"ended": pid, "code": code}), flush=True)

    def gone(self, client: socket.socket) -> None:
        """Whoever asked for it has ended, perhaps by SIGKILL, which it could not pass on."""
        for pid in [pid for pid, each in self.asked.items() if each is client]:
            del self.asked[pid]
            os.kill(pid, signal.SIGKILL)
        client.close()

    def leave(self, more: list[socket.socket]) -> None:
        """In a child: no connection is its own. Closed later, when Python finds that nobody needs
        it, it would take along what the request brought under the same number."""
        for client in (*self.asked.values(), *more):
            client.close()

    def kill(self) -> None:
        for pid in self.running - self.nurseries:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _serve(door: socket.socket, tests: list[str]) -> dict[str, Any] | None:
    """Fork until the input ends; returns the request in a child, None in the nursery itself."""
    _load(tests)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lose {len(threads) - 1} threads: set *_NUM_THREADS=1"
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    forks, text = Forks(), b""
    while True:
        clients = list(forks.asked.values())
        ready, _, _ = select.select([0, woken, door, *clients], [], [])
        if woken in ready:
            os.read(woken, READ_BYTES)
            forks.reap()
        for client in clients:
            if client in ready and client.fileno() >= 0:
                forks.gone(client)
        requests: list[tuple[dict[str, Any], socket.socket | None]] = []
        if door in ready:
            requests += _asked(door)
        if 0 in ready:
            chunk = os.read(0, READ_BYTES)
            if not chunk:
                break
            *lines, text = (text + chunk).split(b"\n")
            requests += [(request, None) for request in forks.read(lines)]
        for request, client in requests:
            pid = os.fork()
            if pid == 0:
                forks.leave([asker for _, asker in requests if asker])
                _become(request, woken, wake, door.detach())
                return request
            _answer(forks, pid, request, client)
    forks.kill()
    return None


def _asked(door: socket.socket) -> list[tuple[dict[str, Any], socket.socket | None]]:
    """One request by the socket: its descriptors, then a line that says which numbers they have."""
    client, _ = door.accept()
    client.settimeout(ASKS_S)
    _, descriptors, _, _ = socket.recv_fds(client, 1, DESCRIPTORS_MAX)
    with client.makefile("rb") as line:
        told = line.readline()
    if not told.endswith(b"\n"):  # it was killed meanwhile
        client.close()
        return []
    request = json.loads(told)
    assert len(descriptors) == len(request["numbers"]), request
    return [({**request, "descriptors": descriptors}, client)]


def _answer(forks: Forks, pid: int, request: dict[str, Any], client: socket.socket | None) -> None:
    """Its process id now, its exit code when it ends."""
    forks.add(pid, request["argv"])
    if client is None:
        print(json.dumps({"pid": pid}), flush=True)
        return
    forks.asked[pid] = client
    for descriptor in request["descriptors"]:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        client.sendall(b"%d\n" % pid)


def _load(tests: list[str]) -> None:
    """Import what takes seconds; torch's optimizers bring half of it with their first step, the
    command line's arguments some with their first word. Checkpoints of torch are of train.py: a
    tenth of a second, which is a sixth of all that a rack of a few steps takes.

    Nothing of it is rubbish. A child that does not know this looks through all of it for some when
    it ends, and so copies it: a second of work.
    """

    import torch
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous
    import torch.distributed.launcher.api

    import mend.api
    import mend.engine.witness
    import mend.tools
    import mend.tools.coordinate
    import mend.tools.launch
    from tests import kernels

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()
    with contextlib.redirect_stdout(io.StringIO()):
        mend.tools.app(["version"], standalone_mode=False)
    if tests:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a fork of what has begun CUDA has none
        import_tests(tests)
    else:
        assert callable(rendezvous.get_method_name)
        rendezvous.get_method_name = lambda depth=2: "not asked for"
    kernels.load()
    gc.collect()
    gc.freeze()


class Unimported:
    """A pytest plugin: the files that cannot be imported."""

    def __init__(self) -> None:
        self.files = set[Path]()

    def pytest_exception_interact(self, node: Any) -> None:
        self.files.add(node.path.resolve())


def import_tests(words: list[str]) -> None:
    """As pytest does it. A module that fails is forgotten, so that workers fail at it too: pytest
    leaves what it has of it in sys.modules, and a fork would take that for a file without tests."""
    import pytest

    failed = Unimported()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", "-s", "-p", "no:cacheprovider", *words], [failed])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).resolve() in failed.files:
            del sys.modules[name]


def _python_path() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


OWN_PATHS = [each for each in sys.path if each not in (os.getcwd(), *_python_path())]
"""Of the installation."""


def _become(request: dict[str, Any], *inherited: int) -> None:
    """Leave everything of the nursery behind but its imports."""
    signal.set_wakeup_fd(-1)
    # A shell in the background has Ctrl-C ignored, and nohup a SIGHUP.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in request.get("ignored", ()):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in inherited:
        os.close(descriptor)
    os.setsid()
    if request.get("namespace"):
        _enter(Path("/run/netns", request["namespace"]))
    if "network" in request:
        _enter(Path(request["network"]))
    os.environ.clear()
    os.environ.update(request["env"])
    if "descriptors" in request:
        _stand_in(request)
        given = dict(zip(request["numbers"], request["descriptors"], strict=True))
    else:
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        given = {0: nothing, 1: log, 2: log}
    # Out of the way first: one that was given may have the number that another is to get.
    far = {new: fcntl.fcntl(old, fcntl.F_DUPFD, 1 + max(given)) for new, old in given.items()}
    for descriptor in set(given.values()):
        os.close(descriptor)
    for new, old in far.items():
        os.dup2(old, new)
        os.close(old)


def _enter(network: Path) -> None:
    """Have another network from here on. Root only."""
    if network.samefile("/proc/self/ns/net"):
        return
    opened = os.open(network, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(opened, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")
    os.close(opened)


def _stand_in(request: dict[str, Any]) -> None:
    """For a `python` that somebody started elsewhere: with its folder, its paths, its name."""
    os.chdir(request["folder"])
    sys.executable, argv = request["executable"], request["argv"]
    multiprocessing.set_executable(sys.executable)
    named = argv[0] in ("-m", "-c")
    first = request["folder"] if named else str(Path(argv[0]).resolve().parent)
    sys.path[:] = [first, *_python_path(), *OWN_PATHS]


if __name__ == "__main__":
    main()
