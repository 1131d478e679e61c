"""`mend repro` on a script that knows nothing of it: two runs, and the operator that parts them.

The commands are run in this process; what they start is forked from one that has torch loaded, but
for one test, whose script is started as users do.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from typer.testing import CliRunner

from mend.errors import CertificateError, MendError
from mend.tools import app, repro_runs
from tests.process.racks import LIMIT_S, ROOT, environment, until

SCRIPT = ["--", "-m", "tests.process.planted"]


def repro(*arguments: str) -> tuple[int, str]:
    """Status and stdout."""
    done = invoke(*arguments)
    return done.exit_code, done.stdout


def invoke(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["repro", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def found(*arguments: str) -> dict[str, Any]:
    status, said = repro("--json", *arguments)
    verdict: dict[str, Any] = json.loads(said)
    assert status == int(not verdict["equal"])
    return verdict


@pytest.mark.usefixtures("warm")
def test_an_atomic_add_is_found_over_two_ranks(tmp_path: Path) -> None:
    verdict = found("--nproc", "2", "--keep", str(tmp_path), *SCRIPT, "--fault", "atomic")
    assert (verdict["ranks"], verdict["pairs"]) == ([2, 2], 2)
    finding = verdict["finding"]
    assert (finding["step"], finding["direction"], finding["module"]) == (2, "forward", "tokens")
    assert finding["operator"] == "planted.atomic_sum.default"
    assert finding["line"].startswith("tests/process/planted.py:")
    assert "order depends on threads or time" in finding["cause"]
    assert (tmp_path / "B-operators" / "rank-1.jsonl").exists()
    status, said = repro(str(tmp_path / "A-operators"), str(tmp_path / "B-operators"))
    assert status == 1
    assert "    operator   planted.atomic_sum.default\n    line       tests/" in said


SETTINGS = {
    "ranks: 1 and 2": ("--a-nproc", "0", "--b-nproc", "2"),
    "microbatches": ("--a-args", "--microbatches 1", "--b-args", "--microbatches 4"),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("differs", SETTINGS)
def test_an_operator_that_depends_on_the_batch_is_found_between_settings(differs: str) -> None:
    command = [*SCRIPT, "--fault", "batch", "--fault-step", "1", "--steps", "1"]
    verdict = found(*SETTINGS[differs], *command)
    finding = verdict["finding"]
    assert (finding["step"], finding["module"]) == (1, "tokens")
    assert finding["operator"] == "planted.batch_sum.default"
    assert verdict["facts"] == ([differs] if "ranks" in differs else [])


@pytest.mark.usefixtures("warm")
def test_the_fault_of_the_example_is_found() -> None:
    finding = found("--", str(ROOT / "examples" / "find_difference.py"), "--steps", "1")["finding"]
    assert (finding["module"], finding["operator"]) == ("1", "aten.randperm.generator")
    assert "random numbers" in finding["cause"]


@pytest.mark.usefixtures("warm")
def test_equal_runs_and_runs_that_fail() -> None:
    assert found("--steps", "2", *SCRIPT)["steps"] == 2
    assert found("--steps", "1", str(ROOT / "tests" / "process" / "planted.py"))["steps"] == 1
    with pytest.raises(MendError, match=r"run A \(1 of 2\) ended with status 2:\n(.|\n)*--fault"):
        repro(*SCRIPT, "--fault", "unknown")
    with pytest.raises(MendError, match="no step of a torch optimizer"):
        repro(*SCRIPT, "--steps", "0")


HASHED = """
import os, sys, torch
words = "alpha beta gamma delta epsilon zeta".split()
seed = os.environ.get("PYTHONHASHSEED", "random")
number = {word: at for at, word in enumerate(sorted(words, key=lambda word: hash_of(seed, word)))}
torch.manual_seed(1)
first = 1 + number["alpha"] if sys.argv[1] == "start" else 1.0
weight = torch.nn.Parameter(torch.full((6, 2), float(first)))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(2):
    weight[[number[word] for word in words]].cumsum(0).square().sum().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("where", "part"), [("start", "start"), ("step", "gradients")])
def test_hash_seed_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, part: str
) -> None:
    """A script whose vocabulary was a set was not resolved in two minutes. What is
    forked keeps the hashes of its parent, so the script orders its words by the variable."""
    order = (
        "from hashlib import sha256\ndef hash_of(*a): return sha256(repr(a).encode()).digest()\n"
    )
    (tmp_path / "hashed.py").write_text(order + HASHED)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    verdict = found("--", str(tmp_path / "hashed.py"), where)
    finding = verdict["finding"]
    assert (finding["step"], finding["part"], finding["measured"]) == (1, part, True)
    assert finding["cause"].startswith("the order of a set")
    assert "PYTHONHASHSEED" in finding["cause"]
    assert not verdict["facts"], "repro has chosen the seeds, and nobody else"
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    assert found("--", str(tmp_path / "hashed.py"), where)["equal"], "a seed that is set stays"


@pytest.mark.usefixtures("warm")
def test_cuts_are_certified_and_the_certificate_holds(tmp_path: Path) -> None:
    key, written = tmp_path / "key.pem", tmp_path / "bits.json"
    private = Ed25519PrivateKey.generate()
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = tmp_path / "key.pub"
    public.write_bytes(
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    cuts = ("--microbatches", "4", "--ranks", "2", "--steps", "2")
    output = ("--output", str(written), "--sign", str(key))
    status, said = repro("--certify", *cuts, *output, str(ROOT / "examples" / "equal_bits.py"))
    content = json.loads(written.read_text())["content"]
    verdicts = {each["cut"]: each["verdict"] for each in content["cuts"]}
    equal = dict.fromkeys(("repeated", "4 microbatches", "2 ranks"), "equal")
    missing = {"another GPU": "not available"}
    assert verdicts == {"uncut": "uncut", **equal, **missing}, said
    assert content["cuts"][-1]["why"] == "the parameters are on cpu"
    assert status == 0
    assert len({each["all steps"] for each in content["cuts"][:-1]}) == 1
    about = [content[name] for name in ("level", "seed", "leaves", "steps")]
    assert about == ["shape", 7, 8, 2]
    assert "in two runs, in 4 microbatches and on 2 ranks." in said
    assert repro("--verify", str(written), "--key", str(public)) == (0, said)
    same = repro("--verify", str(written), "--against", str(written), "--key", str(public))
    assert same[0] == 0
    assert "equal: 2 steps: gradients, weights, optimizer\n" in same[1]
    written.write_text(written.read_text().replace('"leaves": 8', '"leaves": 4'))
    with pytest.raises(CertificateError, match="was edited"):
        repro("--verify", str(written))


@pytest.mark.usefixtures("warm")
def test_script_that_cannot_be_cut_is_certified_for_repeats_only(tmp_path: Path) -> None:
    script = tmp_path / "whole.py"
    script.write_text(WHOLE)
    written = tmp_path / "whole.json"
    status, said = repro("--certify", "--microbatches", "2", "--output", str(written), str(script))
    rows = {each["cut"]: each for each in json.loads(written.read_text())["content"]["cuts"]}
    assert rows["repeated"]["verdict"] == "equal"
    assert (rows["2 microbatches"]["verdict"], rows["2 ranks"]["verdict"]) == ("failed", "not cut")
    assert "no such option" in rows["2 microbatches"]["why"]
    assert "every rank was given the whole batch" in rows["2 ranks"]["why"]
    assert "in two runs. Not certified: 2 microbatches, 2 ranks." in said
    assert status == 1, "microbatches were asked for"


WHOLE = """
import sys, torch
if sys.argv[1:]:
    sys.exit("no such option: --microbatches")
torch.manual_seed(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
"""


HANGS = """
import sys, threading, torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], 0.1)
try:
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
finally:
    open(sys.argv[1], "a").write("hangs")
    threading.Event().wait()
"""


@pytest.mark.usefixtures("warm")
def test_a_script_that_hangs_behind_its_last_step_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of two ranks did once, in destroy_process_group(): the command waited for ever."""
    marks, look = tmp_path / "marks", repro_runs._End.look
    marks.touch()

    def look_when_it_hangs(end: repro_runs._End) -> bool:
        """The time in which nothing is recorded begins where it hangs."""
        run = "AB".index(end._folder.name[0])
        if marks.read_text().count("hangs") <= run:
            end._since_s = time.monotonic()
        return look(end)

    monkeypatch.setattr(repro_runs._End, "look", look_when_it_hangs)
    monkeypatch.setattr(repro_runs, "END_S", 1.0)
    (tmp_path / "hangs.py").write_text(HANGS)
    done = invoke("--steps", "2", "--", str(tmp_path / "hangs.py"), str(marks))
    assert done.exit_code == 0
    for name in ("A (1 of 2)", "B (2 of 2)"):
        assert f"repro: run {name}: killed 1 s after step 2, its last step\n" in done.stderr
    assert done.stderr.count('hangs.py", line 11 in <module>\n') == 2
    assert done.stdout == "equal: 2 steps: losses, gradients, weights, optimizer\n"


@pytest.mark.slow
def test_one_run_is_recorded_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The real command, stopped while its script would train for ever."""
    words = [*("repro", "--record", str(tmp_path)), *SCRIPT, "--steps", "1000000"]
    command = subprocess.Popen(
        [sys.executable, "-m", "mend.tools", *words], cwd=ROOT, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    recording = tmp_path / "rank-0.jsonl"
    until(lambda: recording.exists() and recording.read_text().count("\n") > 3, "it trains")
    command.send_signal(signal.SIGINT)
    said, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 130, said
    assert said.splitlines()[-1] == "repro: stopped"
    assert json.loads(recording.read_text().splitlines()[2])["step"] == 2
    words_of_all = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [words for words in words_of_all if str(tmp_path).encode() in words]
