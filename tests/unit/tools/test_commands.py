"""The command line as a person meets it: help that teaches, mistakes that are named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mend.tools import app, main
from mend.tools import launch as launch_module
from mend.tools.keys_command import create
from mend.tools.launch import Job, LaunchResult


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that the command would have started."""
    jobs: list[Job] = []

    def record(job: Job, sink: Callable[[str, str], None]) -> LaunchResult:
        jobs.append(job)
        return LaunchResult({0: 0, 1: 5}, 0)

    monkeypatch.setattr(launch_module, "launch", record)
    return jobs


def test_arguments_after_the_script_belong_to_the_script(asked: list[Job]) -> None:
    answer = CliRunner().invoke(app, ["launch", "--racks", "3", "t.py", "--racks", "9", "-m"])
    assert answer.exit_code == 5, answer.output
    assert asked[0].command == ("t.py", "--racks", "9", "-m")
    assert asked[0].racks == 3


def test_a_module_and_settings_for_every_rack(asked: list[Job]) -> None:
    arguments = ["launch", "--env", "A=1=2", "--env", "B=", "--no-witness", "-m", "my.mod", "x"]
    CliRunner().invoke(app, arguments)
    assert asked[0].command == ("-m", "my.mod", "x")
    assert asked[0].env == {"A": "1=2", "B": ""}
    assert asked[0].witness is False


def test_a_link_between_the_racks(asked: list[Job]) -> None:
    CliRunner().invoke(app, ["launch", "--link", "400mbit,20ms", "t.py", "--link", "x"])
    assert asked[0].link == "400mbit,20ms"
    assert asked[0].command == ("t.py", "--link", "x")


def test_an_env_without_a_value_is_refused(asked: list[Job]) -> None:
    answer = CliRunner().invoke(app, ["launch", "--env", "A", "t.py"])
    assert answer.exit_code == 2
    assert asked == []


def test_help_shows_examples() -> None:
    answer = CliRunner().invoke(app, ["launch", "--help"])
    assert answer.exit_code == 0
    assert "mend launch --max-restarts 3 train.py --lr 3e-4" in answer.output


def test_version_names_mend_and_torch() -> None:
    for arguments in (["--version"], ["version"]):
        answer = CliRunner().invoke(app, arguments)
        assert answer.exit_code == 0
        assert answer.output.startswith("mend=")
        assert "torch=" in answer.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["repro"], "  mend repro -- train.py --lr 3e-4  "),
        (["repro", "--certify"], "  mend repro --certify train.py  "),
        (["repro", "--certify", "--ranks", "2,x", "setup.cfg"], "SCRIPT='setup.cfg': there is no"),
        (["repro", "--sign", "key", "--", "t.py"], "--sign needs --certify"),
        (["repro", "--certify", "--a-nproc", "2", "t.py"], "--a-nproc is an option of two runs"),
        (["repro", "--verify", "no/such"], "no/such cannot be read (No such file or directory)"),
        (["repro", "--", "no/such.py"], "SCRIPT='no/such.py': there is no such file"),
        (["explain", "no/such"], "no/such: there is no such file or folder. Give the folder"),
        (["demo", "--codec", "zip"], "--codec='zip': needs one of float32, bfloat16"),
        (["top", "nohost"], "address='nohost': is not an address. Give tcp://host:port."),
        (["coordinate", "--bind", "127.0.0.1:21899"], "--bind='127.0.0.1:21899'"),
        (
            ["launch", "--base-port", "80", "t.py"],
            "mend: ConfigError: --base-port=80: must be 0 or",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_was_typed_and_the_remedy(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # repro: "0 recordings", and a traceback; explain: no remedy; demo: a setting that nobody named.
    monkeypatch.setattr(sys, "argv", ["mend", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert words[0] != "launch" or told.count("\n") == 1, "one line"


def test_witness_ignores_the_rack_settings_of_the_shell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where a rack listens everywhere it needs an advertised host; a witness that was started from
    the same shell was refused for want of one."""
    from mend.engine import witness

    monkeypatch.setenv("MEND_SIDEBAND_ADDR", "tcp://0.0.0.0:21900")
    monkeypatch.setenv("MEND_RACK", "1")
    create(tmp_path / "key", (bytes(32),))
    monkeypatch.setenv("MEND_KEY_FILE", str(tmp_path / "key"))
    served: list[str] = []
    monkeypatch.setattr(witness, "run", lambda bind, *_, **__: served.append(bind))
    monkeypatch.setattr(sys, "argv", ["mend", "coordinate", "--bind", "tcp://0.0.0.0:21899"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    assert served == ["tcp://0.0.0.0:21899"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--bind", "tcp://127.0.0.1:70000"),
        ("--heartbeat-ms", "5"),
        ("--racks", "99"),
        ("--job-id", "a b"),
    ],
)
def test_a_wrong_option_of_the_witness_is_named_as_it_was_typed(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The error named the setting witness_addr, an argument that nobody had given.
    good = {"--bind": "tcp://127.0.0.1:21899", "--heartbeat-ms": "100"} | {option: value}
    words = [word for pair in good.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["mend", "coordinate", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert f"Change {option}." in capsys.readouterr().err
