"""What each rack of a launch is told, and its exit status. No process is started here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from mend.config import MendConfig
from mend.consensus.records import EVICTIONS_MAX
from mend.engine.state.outcome import RankEnd, write_ended
from mend.errors import ConfigError
from mend.tools import app
from mend.tools import launch as launch_module
from mend.tools.launch import (
    NOBODY_JOINED,
    PLAIN,
    UNMERGED_EXIT,
    Job,
    Launch,
    LaunchResult,
    check_script,
    gpus_by_rack,
    is_untrained,
    metrics_variables,
    plain_command,
    rack_environments,
    torchrun_command,
    visible_gpus,
    witness_command,
)
from mend.tools.processes import TOKEN

JOB = Job(command=("train.py", "--lr", "3"), racks=2, nproc_per_rack=2, job_id="story")
PORTS = [5001, 5002, 5003]


@pytest.mark.parametrize("outcome", ["evicted", "seat-lost"])
def test_a_rack_is_started_again_as_often_as_the_job_may_evict_it(
    tmp_path: Path, outcome: str
) -> None:
    """Whatever `max_restarts` is, which counts failures alone; and not for ever."""
    running = Launch(JOB, lambda who, line: None)
    running._outcomes = tmp_path
    write_ended(tmp_path, RankEnd(1, 1, outcome))
    for count in range(EVICTIONS_MAX):
        running._restarts[1] = running._evictions[1] = count
        assert running._has_lives(1)
    running._restarts[1] = running._evictions[1] = EVICTIONS_MAX
    assert not running._has_lives(1)


def test_job_without_a_step_is_no_success() -> None:
    """Each rack had `merged` and status 0, and the model was as it began."""
    ended = [RankEnd(0, 0, "merged"), RankEnd(1, 0, "merged")]
    assert is_untrained(ended)
    assert not is_untrained([])
    assert not is_untrained([*ended, RankEnd(2, 0, "merged", step=5, tokens=5)])
    assert not is_untrained([*ended, RankEnd(2, 0, "local")])
    assert LaunchResult({0: 0, 1: 0}, 0, untrained=True).status == UNMERGED_EXIT
    assert LaunchResult({0: 5, 1: 0}, 0, untrained=True).status == 5


def test_empty_key_file_of_the_racks_counts_as_not_set() -> None:
    """The witness and `watch=` had a key, and the racks had none."""
    asked = replace(JOB, env={"MEND_KEY_FILE": " ", "MEND_CODEC": "", "MEND_JOB_ID": ""})
    assert Launch(asked, lambda who, line: None).job.env == {"MEND_CODEC": ""}


def test_job_name_in_env_is_that_of_the_witness() -> None:
    """It had a random one, and refused every rack."""
    job = Job(command=("train.py",), env={"MEND_JOB_ID": "mine", "MEND_RACKS": "2"}).named()
    assert job.job_id == "mine"
    assert "mine" in witness_command(job, 5003)
    assert replace(job, env={}, job_id="").named().job_id.startswith("job-")
    assert replace(JOB, env={"MEND_JOB_ID": "story"}).named().job_id == "story"


@pytest.mark.parametrize(("name", "value"), [("MEND_JOB_ID", "other"), ("MEND_RACKS", "3")])
def test_env_with_another_job_than_the_options_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"--env {name}.*Leave it out of --env"):
        replace(JOB, env={name: value})


def test_first_rank_of_a_rack_says_why_its_work_is_not_merged(tmp_path: Path) -> None:
    running = Launch(JOB, lambda who, line: None)
    running._outcomes = tmp_path
    for rank in (2, 0, 1):
        write_ended(tmp_path, RankEnd(1, rank, "aborted", f"rank {rank}"))
    assert {rack: told.rank for rack, told in running._find_unmerged().items()} == {1: 0}


def test_every_rack_learns_its_number_and_everybodys_address() -> None:
    first, second = rack_environments(JOB, {"PATH": "/bin"}, PORTS, [])
    assert (first["MEND_RACK"], second["MEND_RACK"]) == ("0", "1")
    assert first["MEND_SIDEBAND_ADDR"] == "tcp://127.0.0.1:5001"
    assert second["MEND_SIDEBAND_ADDR"] == "tcp://127.0.0.1:5002"
    for one in (first, second):
        assert one["MEND_SIDEBAND_PEERS"] == "0=tcp://127.0.0.1:5001,1=tcp://127.0.0.1:5002"
        assert one["MEND_WITNESS_ADDR"] == "tcp://127.0.0.1:5003"
        assert (one["MEND_RACKS"], one["MEND_JOB_ID"], one["PATH"]) == ("2", "story", "/bin")
        assert "CUDA_VISIBLE_DEVICES" not in one


def test_port_of_metrics_differs_between_the_processes_of_a_machine() -> None:
    """Given to all of them, it is taken by the first."""
    for job in (JOB, replace(JOB, env={"MEND_METRICS_PORT": "9464"})):
        shell = {} if job.env else {"MEND_METRICS_PORT": "9464"}
        racks = rack_environments(job, shell, PORTS, [])
        assert [each["MEND_METRICS_PORT"] for each in racks] == ["9464", "9465"]
        assert metrics_variables({**shell, **job.env}, 2) == {"MEND_METRICS_PORT": "9466"}
    assert metrics_variables({"MEND_METRICS_PORT": "0"}, 1) == {}


def test_environment_set_by_launch_is_read_by_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MEND_ name that no setting has is refused by MendConfig: then no rack would start."""
    environment = rack_environments(JOB, {TOKEN: "x"}, PORTS, [])[1]
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    config = MendConfig()
    assert (config.rack_number, config.racks, config.job_id) == (1, 2, "story")
    assert config.bind_address == config.peer_addresses[1] == "tcp://127.0.0.1:5002"
    assert config.witness_addr == "tcp://127.0.0.1:5003"


def test_without_a_witness_an_inherited_address_of_one_is_not_passed_on() -> None:
    job = Job(command=("train.py",), witness=False)
    for one in rack_environments(job, {"MEND_WITNESS_ADDR": "tcp://10.0.0.1:1"}, PORTS[:2], []):
        assert "MEND_WITNESS_ADDR" not in one


def test_threads_are_shared_out_unless_the_user_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        launch_module.os, "sched_getaffinity", lambda _: set(range(16)), raising=False
    )
    assert rack_environments(JOB, {}, PORTS, [])[0]["OMP_NUM_THREADS"] == "4"
    assert rack_environments(JOB, {"OMP_NUM_THREADS": "7"}, PORTS, [])[0]["OMP_NUM_THREADS"] == "7"
    monkeypatch.setattr(launch_module.os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert rack_environments(JOB, {}, PORTS, [])[0]["OMP_NUM_THREADS"] == "1"


def test_env_has_the_last_word() -> None:
    job = Job(command=("train.py",), env={"MEND_JOB_ID": "mine", "NEW": "1"})
    one = rack_environments(job, {"NEW": "0"}, PORTS, [])[0]
    assert (one["MEND_JOB_ID"], one["NEW"]) == ("mine", "1")


def test_gpus_are_cut_into_equal_runs_in_order() -> None:
    assert gpus_by_rack(list("01234567"), JOB) == ["0,1,2,3", "4,5,6,7"]
    assert gpus_by_rack(["GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e"], JOB) == [
        "GPU-a,GPU-b",
        "GPU-c,GPU-d",
    ]
    assert gpus_by_rack([], JOB) == [None, None]


def test_racks_of_different_sizes_get_as_many_processes_and_gpus_each() -> None:
    job = Job(command=("train.py",), ranks_by_rack=(1, 3), job_id="story")
    assert gpus_by_rack(list("01234"), job) == ["0", "1,2,3"]
    for rack, told in enumerate(rack_environments(job, {}, PORTS, [])):
        assert told["MEND_RANKS_BY_RACK"] == "1,3"
        command = torchrun_command(job, rack)
        assert command[command.index("--nproc-per-node") + 1] == str(job.sizes[rack])
    with pytest.raises(ConfigError, match=r"1\+3 processes need 4 GPUs"):
        gpus_by_rack(list("012"), job)


def test_too_few_gpus_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="2 racks x 2 processes need 4 GPUs") as caught:
        gpus_by_rack(["0", "1", "2"], JOB)
    assert "CUDA_VISIBLE_DEVICES= (empty)" in caught.value.remedy


def test_the_variable_is_asked_before_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("nvidia-smi was asked although CUDA_VISIBLE_DEVICES is set")

    monkeypatch.setattr(subprocess, "run", forbidden)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}) == ["3", "1"]
    assert (
        visible_gpus({"CUDA_VISIBLE_DEVICES": ""})
        == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"})
        == []
    )


def test_nvidia_smi_that_is_not_there_means_no_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0\necho 1\n")
    tool.chmod(0o755)
    assert visible_gpus({}) == ["0", "1"]


def test_a_module_is_started_as_one() -> None:
    job = Job(command=("-m", "my.training", "--steps", "3"), nproc_per_rack=2, job_id="story")
    command = torchrun_command(job, 1)
    assert command[-5:] == ["-m", "--", "my.training", "--steps", "3"]
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[command.index("--rdzv-id") + 1] == "story-rack1-0"
    again = torchrun_command(job, 1, 2)
    assert again[again.index("--rdzv-id") + 1] == "story-rack1-2", "a meeting of its own"


@pytest.mark.parametrize("command", [("train.py", "--start", "warm"), ("-m", "t", "--rdzv", "--")])
def test_torchrun_command_script_arguments_reach_the_script(command: tuple[str, ...]) -> None:
    words = torchrun_command(Job(command=command, job_id="story"), 0)[3:]
    parsed = get_args_parser().parse_args(words)
    module = command[0] == "-m"
    assert parsed.module == module
    assert (parsed.training_script, *parsed.training_script_args) == command[module:]


def test_a_rack_of_one_process_can_do_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that makes a process group finds what it needs: a world of its own."""
    job = Job(command=("-m", "my.training"), torchrun=False)
    assert plain_command(job) == [sys.executable, "-m", "my.training"]
    for key, value in PLAIN.items():
        monkeypatch.setenv(key, value)
    dist.init_process_group("gloo")
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("racks", "witness", "interrupted", "status"),
    [
        ({0: 0, 1: 0}, 0, 0, 0), ({0: 0, 1: 3}, 0, 0, 3), ({1: 3, 0: 4}, 0, 0, 4),
        ({0: 0, 1: -9}, 0, 0, 137), ({0: 0, 1: 0}, 2, 0, 2), ({0: 1, 1: 1}, 0, 15, 143),
        ({0: 0, 1: 0}, None, 0, 0),
    ],
)  # fmt: skip
def test_the_status_is_that_of_the_first_that_failed(
    racks: dict[int, int], witness: int | None, interrupted: int, status: int
) -> None:
    assert LaunchResult(racks, witness, interrupted).status == status


def test_the_status_is_that_of_the_rack_on_whose_account_all_were_ended() -> None:
    assert LaunchResult({0: -15, 1: 7}, 0, culprit=1).status == 7
    assert LaunchResult({0: -15, 1: 7}, 0, interrupted=2, culprit=1).status == 130


def test_racks_that_were_ended_as_their_job_was_over_are_no_success() -> None:
    """Their former life failed, and a script may end a SIGTERM with 0."""
    assert LaunchResult({0: 0, 1: 0}, 0, culprit=1).status == 1


def test_a_rack_that_cannot_be_started_again_ends_nobody_else(tmp_path: Path) -> None:
    """The error of the system ended the launcher, and with it all racks that trained."""
    said: list[str] = []
    job = Job(command=("x" * (1 << 20),), torchrun=False)  # longer than the kernel takes
    run = Launch(job, lambda _, line: said.append(line))
    run._outcomes, run._environments = tmp_path, [{}, {}]
    run._start_again(1)
    assert said == ['rack 1 not-restarted reason="Argument list too long"']


def test_a_signal_without_a_name_is_a_number(tmp_path: Path) -> None:
    """The launcher ended with a ValueError, and killed all racks."""
    said: list[str] = []
    job = Job(command=("-c", "import os; os.kill(os.getpid(), 36)"), racks=1, torchrun=False)
    run = Launch(job, lambda _, line: said.append(line))
    run._outcomes, run._environments = tmp_path, [dict(os.environ)]
    run.racks = [run._start_rack(0)]
    run.racks[0].process.wait()
    run._poll_children()
    assert said == ["rack 0 ended exit=-36"]


@pytest.mark.parametrize(
    ("code", "word", "status"),
    [
        (0, "kept-local", 3), (0, "aborted", 3), (1, "kept-local", 3), (1, "aborted", 1),
        (-9, "kept-local", 137), (7, "uncounted", 7),
    ],
)  # fmt: skip
def test_a_rack_that_told_of_unmerged_work_is_no_success(code: int, word: str, status: int) -> None:
    """It crashed: that comes first. `session` raised NotMerged: that is 1, and means 3."""
    told = {1: RankEnd(1, 0, word)}
    assert LaunchResult({0: 0, 1: code}, 0, unmerged=told).status == status
    assert LaunchResult({0: 0, 1: code}, 0, interrupted=2, unmerged=told).status == 130


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"job_id": "a b"}, "--job-id"),
        ({"nproc_per_rack": 0}, "--nproc-per-rack"),
        ({"ranks_by_rack": (1, 2, 3)}, "--nproc-per-rack"),
        ({"ranks_by_rack": (1, 0)}, "--nproc-per-rack"),
        ({"base_port": 80}, "--base-port"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_start_cannot_be_made(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Job(**{"command": ("train.py",), **wrong})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["no/such.py"], "SCRIPT='no/such.py': there is no such file"),
        (["/"], "SCRIPT='/': is a folder without __main__.py"),
        (["--log-dir", "/dev/null/logs", __file__], "--log-dir='/dev/null/logs': cannot be made"),
        (["--env", "MEND_FOO=1", __file__], "MEND_FOO='1': is not a setting of mend"),
        (["--env", "MEND_FRAGMENTS=four", __file__], "fragments='four': needs"),
        (["--env", "MEND_CONFIG=/no/such", __file__], "MEND_CONFIG='/no/such': cannot be read"),
        (["--env", "MEND_KEY_FILE=/no/such", __file__], "key_file='/no/such': cannot be read"),
    ],
)
def test_the_command_says_what_is_not_there_before_it_starts_anything(
    options: list[str], said: str
) -> None:
    """Each rack failed by itself, or it was a traceback."""
    with pytest.raises(ConfigError) as caught:
        app(["launch", *options], standalone_mode=False)
    assert said in str(caught.value)


def test_a_script_is_a_file_a_folder_that_runs_or_a_module(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "__main__.py").touch()
    for script in (__file__, str(tmp_path / "runs"), "-m"):
        check_script(script)
    with pytest.raises(ConfigError, match="SCRIPT"):
        check_script(str(tmp_path))


@pytest.mark.parametrize(
    ("env", "joined", "code", "last"),
    [
        ({"MEND_DIAGNOSTICS_DIR": "runs/a"}, True, 0, 'next="mend report runs/a"'),
        ({}, True, 0, 'next="--env MEND_DIAGNOSTICS_DIR=FOLDER records a run, and '
                      'mend report FOLDER draws it"'),
        ({}, False, 0, f'next="{NOBODY_JOINED}"'),
        ({"MEND_DIAGNOSTICS_DIR": "runs/a"}, True, 3, "rack 0 ended exit=3"),
    ],
)  # fmt: skip
def test_launch_that_ends_in_order_says_what_to_do_next(
    tmp_path: Path, env: dict[str, str], joined: bool, code: int, last: str
) -> None:
    script = tmp_path / "script.py"
    joins = "import os; open(os.environ['MEND_OUTCOMES'] + '/rack0', 'w')\n" * joined
    script.write_text(f"{joins}raise SystemExit({code})")
    job = Job(
        command=(str(script),), racks=1, witness=False, torchrun=False, job_id="story", env=env
    )
    said: list[str] = []
    outcome = Launch(job, lambda name, line: said.append(line)).run()
    assert outcome.status == code
    assert any(line == last for line in said[-2:]), said
    assert code == 0 or not any("next=" in line for line in said)
