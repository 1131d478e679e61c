"""`mend launch` with real processes: racks are told who they are, and no process outlives it.

Every process of a launch, the witness too, carries a token in its environment; "gone" means that no
process of this machine carries it. Where a test is about something else than how processes begin
and are ended, they are forked (`nursery.python`): they carry no token, but end with one that does.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mend.tools.keys_command import create
from mend.tools.launch import UNMERGED_EXIT, Job, LaunchResult, launch
from mend.tools.processes import TOKEN, orphans
from tests.process.racks import LIMIT_S, Nursery

TELL = """
import os, sys
print("told", os.environ["MEND_RACK"], os.environ["MEND_RACKS"], os.environ["RANK"], sys.argv[1:])
if os.environ["MEND_RACK"] == "1" and "--fail" in sys.argv:
    os._exit(7)
print("done")
"""

HANG = """
import os, signal, subprocess, sys
if "--stubborn" in sys.argv:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
if "--child" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
signal.signal(signal.SIGUSR1, lambda *_: print("asked", os.environ["RANK"], flush=True))
print("token", os.environ["LAUNCHED_BY_MEND"], flush=True)
print("up", os.environ["MEND_RACK"], os.getpid(), os.getppid(), flush=True)
import time
while True:
    time.sleep(600)
"""


class Launcher:
    """A running `mend launch` whose output is read until something has been said."""

    def __init__(self, script: Path, *arguments: str, python: str = sys.executable) -> None:
        # Without a witness: these scripts begin no job, of which it would know.
        command = [python, "-m", "mend.tools", "launch", "--no-witness", str(script), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.said = ""
        self.token = ""
        self.workers: list[int] = []

    def until(self, enough: Callable[[str], bool]) -> None:
        """Read until `enough(everything said)`."""
        assert self.process.stdout is not None
        limit = time.monotonic() + LIMIT_S
        while not enough(self.said):
            ready, _, _ = select.select([self.process.stdout], [], [], limit - time.monotonic())
            assert ready, f"said in {LIMIT_S} s only:\n{self.said}"
            chunk = os.read(self.process.stdout.fileno(), 65536)
            assert chunk, f"ended, having said only:\n{self.said}"
            self.said += chunk.decode()
            if found := re.search(r"token (\w+)", self.said):
                self.token = found[1]

    def up(self) -> dict[int, tuple[int, int]]:
        """Wait until both racks train: rack -> (worker, its torchrun)."""
        pattern = re.compile(r"up (\d) (\d+) (\d+)\n")
        self.until(lambda said: len(pattern.findall(said)) == 2)
        found = {int(r): (int(pid), int(parent)) for r, pid, parent in pattern.findall(self.said)}
        self.workers = [pid for pid, _ in found.values()]
        return found

    def end(self) -> int:
        out, _ = self.process.communicate(timeout=LIMIT_S)
        self.said += out.decode()
        return self.process.returncode

    def gone(self) -> bool:
        """Whether every process of the launch ends within the limit."""
        assert self.token
        limit = time.monotonic() + LIMIT_S
        while left := orphans(self.token) + [p for p in self.workers if alive(p)]:
            if time.monotonic() > limit:
                pytest.fail(f"still there: {left}")
            os.sched_yield()
        return True


def launched(job: Job) -> tuple[LaunchResult, list[str]]:
    """To its end, in this process; and each line that it said, with who said it."""
    said: list[str] = []
    return launch(job, lambda who, line: said.append(f"[{who}] {line}")), said


def alive(pid: int) -> bool:
    """Not a zombie either, which waits for nothing but to be counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


Start = Callable[..., Launcher]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Launcher] = []

    def begin(text: str, *arguments: str, **how: str) -> Launcher:
        script = tmp_path / "script.py"
        script.write_text(text)
        started.append(Launcher(script, *arguments, **how))
        return started[-1]

    yield begin
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        if launcher.process.stdout is not None:
            launcher.process.stdout.close()
        for pid in orphans(launcher.token) if launcher.token else []:
            os.kill(pid, signal.SIGKILL)


def test_racks_are_told_who_they_are_and_a_failing_one_is_reported_alone(
    start: Start, nursery: Nursery
) -> None:
    launcher = start(TELL, "--fail", "--steps", "3", python=nursery.python)
    assert launcher.end() == 7  # of the worker; torchrun itself would answer 1
    assert "[rack 0] told 0 2 0 ['--fail', '--steps', '3']" in launcher.said
    assert "[rack 1] told 1 2 0 ['--fail', '--steps', '3']" in launcher.said
    assert "[rack 0] done" in launcher.said
    assert "[rack 1] done" not in launcher.said
    assert "exitcode: 7" in launcher.said or "exitcode  : 7" in launcher.said
    assert "[launch] rack 0 ended exit=0" in launcher.said
    assert "[launch] rack 1 ended exit=7" in launcher.said
    assert "\x1b" not in launcher.said, "colours although nobody looks"


def test_sigusr1_ends_nothing_and_a_dead_rack_takes_nobody_with_it(start: Start) -> None:
    """Schedulers warn with it: all ranks are told, and no torchrun, which would die of it. Then a
    torchrun is killed the hard way: worker and grandchild are orphans, and cleaned up."""
    launcher = start(HANG, "--child")
    racks = launcher.up()
    launcher.process.send_signal(signal.SIGUSR1)
    launcher.until(lambda said: said.count("asked 0") == 2)
    assert launcher.said.count("signal=SIGUSR1 to=all-racks") == 1
    for worker, torchrun in racks.values():
        assert alive(worker)
        assert alive(torchrun)
    os.kill(racks[1][1], signal.SIGKILL)
    launcher.until(lambda said: "rack 1 ended" in said)
    assert re.search(
        r"rack 1 ended exit=-9 signal=SIGKILL orphans_killed=2 still_running=0", launcher.said
    )
    assert launcher.process.poll() is None
    assert alive(racks[0][0])
    assert "rack 0 ended" not in launcher.said
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM
    assert launcher.said.count("signal=SIGTERM to=all-racks") == 1
    assert launcher.gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_all_racks_and_nothing_is_left(
    start: Start, nursery: Nursery, number: signal.Signals
) -> None:
    """Forked; the test above and the next have racks that begin as a user's do."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` has it ignored
    try:
        launcher = start(HANG, "--child", python=nursery.python)
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher.up()
    launcher.process.send_signal(number)
    assert launcher.end() == 128 + number
    assert launcher.said.count(f"signal={number.name} to=all-racks") == 1
    assert launcher.gone()


@pytest.mark.slow
def test_a_second_signal_kills_what_ignores_the_first(start: Start) -> None:
    launcher = start(HANG, "--stubborn", "--child")
    launcher.up()
    launcher.process.send_signal(signal.SIGINT)
    launcher.until(lambda said: "signal=SIGINT to=all-racks" in said)
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    assert "rack 0 ended exit=-9" in launcher.said, "torchrun gave up by itself, nobody killed it"
    assert launcher.gone()


@pytest.mark.usefixtures("warm")
def test_a_second_signal_counts_even_while_the_first_is_passed_on(tmp_path: Path) -> None:
    """It was swallowed: the count was read again after the racks had been told."""
    script = tmp_path / "script.py"
    script.write_text(HANG)
    up = 0

    def sink(who: str, line: str) -> None:
        nonlocal up
        up += line.startswith("up ")
        if (line.startswith("up ") and up == 2) or line.startswith("signal=SIGINT"):
            signal.raise_signal(signal.SIGINT)

    outcome = launch(Job(command=(str(script), "--stubborn"), witness=False), sink)
    assert outcome.racks == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert outcome.status == 128 + signal.SIGINT


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_racks_follow_a_launcher_that_was_killed(start: Start) -> None:
    launcher = start(HANG)
    launcher.up()
    launcher.process.kill()
    launcher.process.wait()
    assert launcher.gone()


def test_the_token_of_the_script_is_the_launchers() -> None:
    assert TOKEN in HANG


KILLED_ONCE = """
import os, pathlib, signal, sys, time, torch, mend
import torch.distributed as dist
torch.set_num_threads(1)
model = wrapped = torch.nn.Linear(8, 8)
rack, ranks = os.environ["MEND_RACK"], int(os.environ["WORLD_SIZE"])
again = pathlib.Path(sys.argv[1])
if ranks > 1:
    dist.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
second = os.environ["RESTARTED_BY_MEND"] != "0"
doomed = rack == "1" and os.environ["RANK"] == str(ranks - 1) and not second

def over(step):  # nobody is done before rack 1 has come back; all ranks of a rack agree
    done = torch.tensor(int(step > 50 and again.exists()))
    if ranks > 1:
        dist.all_reduce(done, dist.ReduceOp.MIN)
    return done.item()

config = mend.MendConfig(sync_period_steps=16, fragments=2, overlap_steps=4)
with mend.session(wrapped, config, optimizer=optimizer) as runtime:
    if second:
        again.touch()
    step = 0
    while not over(step):
        step += 1
        wrapped(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if doomed and step == 40:
            os.kill(os.getpid(), signal.SIGKILL)
status = runtime.status()
# One write, as the ranks share a pipe.
sys.stdout.write(f"digest {status.anchor_digest} open {status.ledger.open}\\n")
sys.stdout.flush()
if ranks > 1:
    dist.destroy_process_group()
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("ranks", "torchrun"),
    [
        pytest.param(1, False, id="plain"),
        pytest.param(2, True, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_rack_that_is_killed_is_started_again_and_joins(
    tmp_path: Path, ranks: int, torchrun: bool
) -> None:
    """Of two ranks, the survivor and the new one met in the store of the former life, and stood in
    gloo's beginning for ever: every life has a torchrun of its own."""
    script = tmp_path / "train.py"
    script.write_text(KILLED_ONCE)
    job = Job(
        command=(str(script), str(tmp_path / "again")), nproc_per_rack=ranks, torchrun=torchrun,
        max_restarts=2, log_dir=tmp_path / "logs",
    )  # fmt: skip
    outcome, said = launched(job)
    told = "\n".join(said)
    assert outcome.status == 0, told
    # torchrun ends with 1 where it sees first that the survivor failed, in gloo.
    killed = "exit=(137|1)" if torchrun else "exit=-9 signal=SIGKILL"
    assert re.search(rf"\[launch\] rack 1 ended {killed} ", told), told
    assert re.search(r"\[launch\] rack 1 ended exit=\S+ .*restart=1/2 still_running=0", told), told
    assert "[launch] rack 1 ended exit=0" in told
    assert "restart=2/2" not in told
    assert "joined versions=" in told
    digests = re.findall(r"digest (\w+) open 0.0", told)
    assert len(digests) == 2 * ranks, told
    assert len(set(digests)) == 1, "all end on the same bits, with everything merged"
    assert "digest" in (tmp_path / "logs" / "rack1.log").read_text()


FAILS = """
import os, pathlib, sys, time
rack, folder, code = os.environ["MEND_RACK"], pathlib.Path(sys.argv[1]), int(sys.argv[2])
if rack == "1":
    lives = folder / "lives"
    lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
    print("life", os.environ["RESTARTED_BY_MEND"])
    sys.exit(code)
while len((folder / "lives").read_text() if (folder / "lives").exists() else "") < int(sys.argv[3]):
    time.sleep(0.01)
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("code", "lives", "torchrun"),
    [(5, 3, False), (UNMERGED_EXIT, 1, False), (UNMERGED_EXIT, 1, True)],
    ids=["failed", "ended with unmerged work", "the same under torchrun"],
)
def test_only_a_rack_that_failed_is_started_again(
    tmp_path: Path, code: int, lives: int, torchrun: bool
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    job = Job(
        command=(str(script), str(tmp_path), str(code), str(lives)), witness=False,
        torchrun=torchrun, max_restarts=2, log_dir=tmp_path / "logs",
    )  # fmt: skip
    outcome, said = launched(job)
    assert outcome.racks == {0: 0, 1: code}, said
    assert (tmp_path / "lives").read_text() == "x" * lives
    log = (tmp_path / "logs" / "rack1.log").read_text()
    assert re.findall(r"life (\d)", log) == [str(life) for life in range(lives)]
    restarts = [line for line in said if "restart=" in line]
    assert len(restarts) == lives - 1


@pytest.mark.usefixtures("warm")
def test_a_job_that_cannot_begin_ends_at_once_with_the_reason(tmp_path: Path) -> None:
    """Rack 0 waited for `start_timeout_s` though the coordinator had refused rack 1."""
    script = tmp_path / "differs.py"
    script.write_text(
        "import os, torch, mend\n"
        "model = torch.nn.Linear(8, 8)\n"
        "fragments = 1 + int(os.environ['MEND_RACK'])\n"
        "config = mend.MendConfig(fragments=fragments, start_timeout_s=3600)\n"
        "mend.mend_init(model, config)\n"
    )
    for witness in (True, False):
        outcome, said = launched(Job(command=(str(script),), witness=witness, torchrun=False))
        assert outcome.status == 1, said
        assert outcome.culprit == 1
        assert re.fullmatch(
            r'\[launch\] not-begun rack=1 exit=1 reason="rack 1 was refused: rack 1 differs from '
            r'rack 0: fragments is 2 there and not here"', said[-1]
        ), said  # fmt: skip
        told = "\n".join(said)
        assert re.search(r"\[rack 0\] .* waiting .*for: .*rack 1 was refused", told), told


TOO_LATE = """
import os, sys, time, torch, mend
folder, rack = sys.argv[1], os.environ["MEND_RACK"]
again, over = os.path.join(folder, "again"), os.path.join(folder, "over")

def wait(path):
    while not os.path.exists(path):
        time.sleep(0.01)

if rack == "1" and os.path.exists(over + "-soon"):
    open(again, "w").close()
    wait(over)
    first = int(open(over).read())
    while os.path.exists(f"/proc/{first}"):
        time.sleep(0.01)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = mend.MendConfig(sync_period_steps=8, fragments=2, start_timeout_s=3600)
mend.mend_init(model, config)
for step in range(20):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rack == "1" and step == 9:
        open(over + "-soon", "w").close()
        os._exit(7)
print("outcome", mend.mend_shutdown(model).outcome)
wait(again)
with open(over + "-is", "w") as file:
    file.write(str(os.getpid()))
os.rename(over + "-is", over)
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("witness", [True, False])
def test_a_rack_that_comes_back_to_a_job_that_is_over_ends_at_once(
    tmp_path: Path, witness: bool
) -> None:
    """It waited until its start timed out: nobody was left to answer it. The witness is, and where
    there is none, the launcher knows that all others have ended."""
    script = tmp_path / "late.py"
    script.write_text(TOO_LATE)
    job = Job(command=(str(script), str(tmp_path)), torchrun=False, max_restarts=1, witness=witness)
    outcome, said = launched(job)
    told = "\n".join(said)
    assert "[rack 0] outcome merged" in said, told
    assert re.search(r"\[launch\] rack 1 ended exit=7 restart=1/1", told), told
    if witness:
        assert outcome.racks == {0: 0, 1: 1}, told
        assert re.search(r"\[rack 1\] .*Refused: job '.*' is over: all its racks have left", told)
    else:
        assert (outcome.racks[0], outcome.culprit) == (0, 1), told
        assert '[launch] not-begun rack=1 exit=-15 reason="all other racks had ended ' in told


@pytest.mark.usefixtures("warm")
def test_a_rack_that_fails_in_a_running_job_ends_nobody_else(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(KILLED_ONCE.replace("os.kill(os.getpid(), signal.SIGKILL)", "os._exit(7)"))
    (tmp_path / "again").touch()
    job = Job(command=(str(script), str(tmp_path / "again")), torchrun=False)
    outcome, said = launched(job)
    assert outcome.racks == {0: 0, 1: 7}, said
    assert not any("not-begun" in line for line in said)


ENDS = """
import os, sys, torch, mend
way, model = sys.argv[1], torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mend.mend_init(model, mend.MendConfig(sync_period_steps=8, fragments=2))
for step in range(20):
    model(torch.randn(4, 8)).square().mean().backward()
    if way == "unseen" and os.environ["MEND_RACK"] == "1":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    else:
        optimizer.step()
    optimizer.zero_grad()
if way == "vanishes" and os.environ["MEND_RACK"] == "1":
    os._exit(0)
if way != "forgets" or os.environ["MEND_RACK"] == "0":
    print("outcome", mend.mend_shutdown(model).outcome)
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("way", "status", "outcome"),
    [
        ("merges", 0, ""),
        ("unseen", 3, "uncounted"),
        ("forgets", 3, "aborted"),
        ("vanishes", 3, "aborted"),
    ],
)
def test_a_job_whose_work_is_not_merged_is_no_success(
    tmp_path: Path, way: str, status: int, outcome: str
) -> None:
    """Every process exits 0; only the launcher can tell."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    job = Job(command=(str(script), way), torchrun=False, max_restarts=2)
    ended, said = launched(job)
    assert (ended.racks, ended.status) == ({0: 0, 1: 0}, status), said
    # Whether rack 0 hears in time that rack 1 is gone is another question.
    if way not in ("forgets", "vanishes"):
        assert "[rack 0] outcome merged" in said
    assert not any("restart=" in line for line in said)
    if outcome:
        assert said[-1].startswith(f"[launch] unmerged rack=1 outcome={outcome} "), said
        last = f"[rack 1] mend: rack 1 rank 0 ended {outcome}"
        assert any(line.startswith(last) for line in said) == (way != "vanishes")


KEYED = """
import os, stat, sys
path = os.environ.get("MEND_KEY_FILE", "")
mode = oct(stat.S_IMODE(os.stat(path).st_mode)) if path else ""
print("key", path, mode, os.environ.get("MEND_INSECURE", ""))
"""


@pytest.mark.parametrize("way", ["its own", "the user's", "insecure"])
def test_every_job_has_a_key_that_is_gone_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    script, mine = tmp_path / "keyed.py", tmp_path / "mine.key"
    script.write_text(KEYED)
    create(mine, (bytes(32),))
    named = {"the user's": {"MEND_KEY_FILE": str(mine)}, "insecure": {"MEND_INSECURE": "1"}}
    monkeypatch.delenv("MEND_KEY_FILE", raising=False)
    said: list[tuple[str, str]] = []
    job = Job(command=(str(script),), witness=False, torchrun=False, env=named.get(way, {}))
    assert launch(job, lambda who, line: said.append((who, line))).status == 0
    (told,) = {line for who, line in said if who.startswith("rack") and line.startswith("key ")}
    (watch,) = [line for who, line in said if line.startswith("watch=")]
    if way == "insecure":
        assert told == "key   1"
        assert watch.startswith('watch="mend top ')
        return
    _, path, mode = told.split()
    assert mode == "0o600"
    assert watch.startswith(f'watch="MEND_KEY_FILE={path} mend top ')
    assert (path == str(mine)) == (way == "the user's")
    assert Path(path).exists() == (way == "the user's")
