"""The recipes for clusters, as far as one gets without a cluster: shells parse them, schemas accept
them, and every rank that they start is told what MendConfig takes."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mend import MendConfig

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
SCRIPTS = [
    EXAMPLES / "two_racks.sh",
    EXAMPLES / "slurm" / "two_racks.sbatch",
    EXAMPLES / "slurm" / "wall_limit.sbatch",
]
SCHEMAS = ("1.27", "1.32", "1.37")
VARIANTS = (".", "gpu", "witness")
POD_IP = "10.1.2.3"

scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
variants = pytest.mark.parametrize("variant", VARIANTS)


# ------------------------------------------------------------------ shell


@scripts
def test_the_shell_parses_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@scripts
def test_shellcheck_finds_nothing(script: Path) -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    checker = str(beside) if beside.exists() else shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck comes with the dev extra")
    done = subprocess.run([checker, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


TORCHRUN = """
echo "$@" > "$TOLD/$$.argv"; env -0 > "$TOLD/$$.env"
[[ -z $NEW ]] || touch "$NEW"
exit "${FAIL:-0}"
"""


class Stand:
    """A folder of programs that stand in for real ones, and what torchrun was told."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.told = folder / "bin", folder / "told"
        self.bin.mkdir()
        self.told.mkdir()
        self.program("torchrun", TORCHRUN)

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def run(self, *command: str, **more: str) -> int:
        kept = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        path = f"{self.bin}:/usr/bin:/bin"
        environ = {**kept, "PATH": path, "TOLD": str(self.told), **more}
        return subprocess.run(["bash", *command], env=environ, check=False).returncode

    def started(self) -> list[tuple[list[str], dict[str, str]]]:
        """(arguments, environment) of each torchrun, by rack and node."""
        found = []
        for path in self.told.glob("*.env"):
            pairs = [each.split("=", 1) for each in path.read_text().split("\0") if each]
            argv = path.with_suffix(".argv").read_text().split()
            found.append((argv, dict(pairs)))
        order = ("MEND_RACK", "SLURM_NODEID")
        return sorted(found, key=lambda each: [each[1].get(name, "") for name in order])


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


def config_from(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> MendConfig:
    """What a rank with this environment makes of it. A wrong or unknown MEND_* raises."""
    with monkeypatch.context() as patch:
        for name, value in environ.items():
            if name.startswith("MEND_"):
                patch.setenv(name, value)
        return MendConfig()


def test_both_racks_here_have_addresses_of_their_own(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stand.run(str(SCRIPTS[0]), "train.py", "--lr", "1", PORT="23000", NPROC="3") == 0
    started = stand.started()
    configs = [config_from(environ, monkeypatch) for _, environ in started]
    assert [config.rack_number for config in configs] == [0, 1]
    assert {config.job_id for config in configs} == {"two-racks"}
    expected = {0: "tcp://127.0.0.1:23000", 1: "tcp://127.0.0.1:23001"}
    for config, (argv, _) in zip(configs, started, strict=True):
        assert config.peer_addresses == expected
        assert config.bind_address == expected[config.rack_number]
        assert argv == ["--standalone", "--nproc-per-node", "3", "train.py", "--lr", "1"]


@pytest.mark.parametrize("rack", [0, 1])
def test_one_rack_of_two_machines(stand: Stand, rack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listening everywhere takes an address to be reached at: that of this machine."""
    assert stand.run(str(SCRIPTS[0]), "--rack", str(rack), "east.example", "10.0.0.2", "a.py") == 0
    ((argv, environ),) = stand.started()
    config = config_from(environ, monkeypatch)
    assert config.rack_number == rack
    assert config.peer_addresses == {0: "tcp://east.example:21900", 1: "tcp://10.0.0.2:21900"}
    assert config.bind_address == "tcp://0.0.0.0:21900"
    assert config.advertise_host == ("east.example", "10.0.0.2")[rack]
    assert argv[-1] == "a.py"


@pytest.mark.parametrize("arguments", [["--rack", "2", "a", "b"], ["--rack", "0", "a"]], ids=str)
def test_wrong_arguments_start_nothing(stand: Stand, arguments: list[str]) -> None:
    assert stand.run(str(SCRIPTS[0]), *arguments) == 2
    assert stand.started() == []


def test_a_rack_that_fails_is_the_exit_status(stand: Stand) -> None:
    assert stand.run(str(SCRIPTS[0]), FAIL="7") == 7
    assert len(stand.started()) == 2, "the other rack ran all the same"


MEND = '[[ $1 $2 == "keys new" ]] && echo made > "$3"'

# srun runs its command once per node of the component, as Slurm's pages describe the variables.
SRUN = """
for argument in "$@"; do
  case "$argument" in --het-group=*) group=${argument#*=} ;; esac
done
while [[ $1 == --* ]]; do shift; done
nodes=SLURM_JOB_NODELIST_HET_GROUP_$group
read -ra hosts <<< "${!nodes}"
for i in "${!hosts[@]}"; do
  SLURM_STEP_NUM_NODES=${#hosts[@]} SLURM_NODEID=$i SLURMD_NODENAME=${hosts[i]} \
    SLURM_GPUS_ON_NODE=8 "$@" & steps+=("$!")
done
status=0
for step in "${steps[@]}"; do wait "$step" || status=$?; done
exit "$status"
"""


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3, 1)], ids=str)
def test_slurm_tells_every_node_its_rack(
    stand: Stand, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand.program("srun", SRUN)
    stand.program("mend", MEND)
    stand.program("scontrol", 'tr " " "\\n" <<< "$3"')
    hosts = [[f"r{rack}n{node}" for node in range(size)] for rack, size in enumerate(sizes)]
    groups = {f"SLURM_JOB_NODELIST_HET_GROUP_{r}": " ".join(own) for r, own in enumerate(hosts)}
    key = tmp_path / "job.key"
    slurm = {"SLURM_HET_SIZE": str(len(sizes)), "SLURM_JOB_ID": "4711", **groups}
    assert stand.run(str(SCRIPTS[1]), "train.py", "a b", MEND_KEY_FILE=str(key), **slurm) == 0
    key.touch()  # `mend keys new` has made it
    nodes = [(rack, node) for rack, size in enumerate(sizes) for node in range(size)]
    for (rack, node), (argv, environ) in zip(nodes, stand.started(), strict=True):
        config = config_from(environ, monkeypatch)
        assert (config.rack_number, config.racks) == (rack, len(sizes))
        assert config.advertise_host == hosts[rack][node]
        leaders = {r: f"tcp://{own[0]}:21900" for r, own in enumerate(hosts)}
        assert config.peer_addresses == leaders
        assert config.job_id == "slurm-4711-0"
        assert config.key_file == key
        assert argv == [
            "--nnodes", str(sizes[rack]), "--node-rank", str(node), "--nproc-per-node", "8",
            "--master-addr", hosts[rack][0], "--master-port", "29500", "train.py", "a", "b",
        ]  # fmt: skip


@pytest.mark.parametrize("stopped", [False, True])
def test_slurm_queues_a_job_again_that_its_limit_has_stopped(
    stand: Stand, tmp_path: Path, stopped: bool
) -> None:
    """And not one whose script has come to its end; an older checkpoint is there in both cases."""
    stand.program("srun", SRUN)
    stand.program("mend", MEND)
    stand.program("scontrol", 'echo "$@" >> "$TOLD/scontrol"; tr " " "\\n" <<< "$3"')
    (tmp_path / "cuts" / "old" / "rack-0").mkdir(parents=True)
    (tmp_path / "cuts" / "old" / "rack-0" / "COMPLETE").touch()
    slurm = {
        "SLURM_HET_SIZE": "2", "SLURM_JOB_ID": "4711", "SLURM_JOB_END_TIME": "1000900",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a", "SLURM_JOB_NODELIST_HET_GROUP_1": "b",
        "SLURM_SUBMIT_DIR": str(ROOT), "FOLDER": str(tmp_path / "cuts"),
        "NEW": str(tmp_path / "cuts" / "COMPLETE") if stopped else "",
    }  # fmt: skip
    assert stand.run(str(SCRIPTS[2]), "--lr=3e-4", **slurm) == 0
    for argv, _ in stand.started():
        assert argv[-6:] == [
            "examples/wall_limit.py", "--folder", str(tmp_path / "cuts"), "--until", "1000000",
            "--lr=3e-4",
        ]  # fmt: skip
    asked = (stand.told / "scontrol").read_text().splitlines()
    assert ("requeue 4711" in asked) == stopped


def test_slurm_without_components_says_what_is_missing(
    stand: Stand, capfd: pytest.CaptureFixture[str]
) -> None:
    assert stand.run(str(SCRIPTS[1])) != 0
    assert "heterogeneous" in capfd.readouterr().err


# ------------------------------------------------------------------ Kubernetes


def documents(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl apply -k folder` would send, for the few verbs that these folders use."""
    yaml = pytest.importorskip("yaml", reason="comes with the dev extra")
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found: list[dict[str, Any]] = []
    for name in plan["resources"]:
        path = folder / name
        found += documents(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for patch in plan.get("patches", []):
        meant = [one for one in found if one["kind"] == patch["target"]["kind"]]
        meant = [one for one in meant if _matches(patch["target"]["name"], one["metadata"]["name"])]
        assert meant, f"{folder.name}: nothing is patched by {patch['target']}"
        for one in meant:
            for operation in yaml.safe_load(patch["patch"]):
                _patched(one, copy.deepcopy(operation))
    return found


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern.removesuffix(".*")) if "*" in pattern else name == pattern


def _patched(document: Any, operation: dict[str, Any]) -> None:
    """add and replace of RFC 6902."""
    *parents, last = operation["path"].strip("/").split("/")
    for key in parents:
        document = document[int(key) if isinstance(document, list) else key]
    key = int(last) if isinstance(document, list) else last
    there = key < len(document) if isinstance(document, list) else key in document
    assert there == (operation["op"] == "replace"), operation
    document[key] = operation["value"]


@variants
@pytest.mark.parametrize("version", SCHEMAS)
def test_schemas_accept_the_manifests(variant: str, version: str) -> None:
    """The strict ones: an unknown field is an error, as a mistyped one would do nothing."""
    validator = pytest.importorskip("kubernetes_validate", reason="comes with the dev extra")
    for document in documents(KUBERNETES / variant):
        validator.validate(document, version, strict=True)


def test_the_schemas_refuse_a_mistyped_field() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="comes with the dev extra")
    job = next(one for one in documents(KUBERNETES) if one["kind"] == "Job")
    job["spec"]["template"]["spec"]["subdomian"] = "racks"
    with pytest.raises(validator.ValidationError):
        validator.validate(job, SCHEMAS[-1], strict=True)


class Cluster:
    """The manifests as a job would meet them: who is called what, and what each pod is told."""

    def __init__(self, variant: str, folder: Path) -> None:
        found = documents(KUBERNETES / variant)
        self.maps = {d["metadata"]["name"]: d["data"] for d in found if d["kind"] == "ConfigMap"}
        self.services = {d["metadata"]["name"]: d["spec"] for d in found if d["kind"] == "Service"}
        jobs = {d["metadata"]["name"]: d["spec"] for d in found if d["kind"] == "Job"}
        self.witness = jobs.pop("witness", None)
        self.racks = jobs
        self.policies = [d["spec"] for d in found if d["kind"] == "NetworkPolicy"]
        self._file = folder / "mend.toml"

    def names(self) -> dict[str, dict[str, str]]:
        """Every name that DNS knows -> labels of the pod behind it."""
        found = {}
        for name, job in self.racks.items():
            pod = job["template"]
            for index in range(job["completions"]):
                found[f"{name}-{index}.{pod['spec']['subdomain']}"] = pod["metadata"]["labels"]
        if self.witness is not None:
            found["witness"] = self.witness["template"]["metadata"]["labels"]
        return found

    def environment(self, job: dict[str, Any]) -> dict[str, str]:
        (container,) = job["template"]["spec"]["containers"]
        told: dict[str, str] = {}
        for source in container.get("envFrom", []):
            told |= self.maps[source["configMapRef"]["name"]]
        for one in container["env"]:
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == "status.podIP"
                told[one["name"]] = POD_IP
            elif "configMapKeyRef" in source:
                key = source["configMapKeyRef"]
                told[one["name"]] = self.maps[key["name"]][key["key"]]
            else:
                told[one["name"]] = one["value"]
        if "MEND_CONFIG" in told:
            folder, _, name = told["MEND_CONFIG"].rpartition("/")
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            volumes = {v["name"]: v for v in job["template"]["spec"]["volumes"]}
            self._file.write_text(self.maps[volumes[mounts[folder]]["configMap"]["name"]][name])
            told["MEND_CONFIG"] = str(self._file)
        if "MEND_KEY_FILE" in told:
            folder, _, name = told["MEND_KEY_FILE"].rpartition("/")
            assert folder in {m["mountPath"] for m in container["volumeMounts"]}
            told["MEND_KEY_FILE"] = str(self._file.with_name(name))
            Path(told["MEND_KEY_FILE"]).touch()
        return told


def selected(service: dict[str, Any], labels: dict[str, str]) -> bool:
    return bool(service["selector"].items() <= labels.items())


@variants
def test_every_pod_is_told_who_it_is(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(variant, tmp_path)
    names = cluster.names()
    for rack, (name, job) in enumerate(sorted(cluster.racks.items())):
        config = config_from(cluster.environment(job), monkeypatch)
        assert (config.rack_number, config.racks) == (rack, len(cluster.racks))
        assert config.advertise_host == POD_IP
        assert config.start_timeout_s == 900, "the file is mounted where MEND_CONFIG says"
        (container,) = job["template"]["spec"]["containers"]
        options = dict(each.split("=", 1) for each in container["args"] if "=" in each)
        assert options["--master-addr"] == f"{name}-0.racks"
        assert config.peer_addresses[rack] == f"tcp://{options['--master-addr']}:21900"
        assert config.bind_address == "tcp://0.0.0.0:21900"
        assert int(options["--nnodes"]) == job["completions"] == job["parallelism"]
        low, high = config.data_port_range or (0, 0)
        assert high - low + 1 >= int(options["--nproc-per-node"])
        for address in config.peer_addresses.values():
            host = address.removeprefix("tcp://").rpartition(":")[0]
            service = cluster.services[host.rpartition(".")[2]]
            assert host in names, f"no pod is called {host}"
            assert selected(service, names[host]), f"DNS does not know {host}"


@variants
def test_only_pods_of_the_job_reach_each_other(variant: str, tmp_path: Path) -> None:
    cluster = Cluster(variant, tmp_path)
    ((policy,),) = (cluster.policies,)
    reached = policy["podSelector"]["matchLabels"]
    for labels in cluster.names().values():
        assert reached.items() <= labels.items()
    rule, observers, scrapers = policy["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": reached}}]}
    assert observers["from"] == [{"podSelector": {"matchLabels": {"mend": "observer"}}}]
    assert [each["port"] for each in observers["ports"]] == [21900, 21899]
    assert [each["port"] for each in scrapers["ports"]] == [9464]


@variants
def test_pod_is_ready_when_it_listens(variant: str, tmp_path: Path) -> None:
    cluster = Cluster(variant, tmp_path)
    first = int(next(iter(cluster.maps.values()))["MEND_DATA_PORTS"].partition("-")[0])
    for job in cluster.racks.values():
        (container,) = job["template"]["spec"]["containers"]
        assert container["readinessProbe"]["tcpSocket"]["port"] == first
        assert "livenessProbe" not in container
    if cluster.witness is not None:
        (container,) = cluster.witness["template"]["spec"]["containers"]
        port, _ = container["ports"]
        assert container["readinessProbe"]["tcpSocket"]["port"] == port["containerPort"]


@variants
def test_metrics_are_served_where_pods_and_policy_say(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(variant, tmp_path)
    for job in [*cluster.racks.values(), *([cluster.witness] if cluster.witness else [])]:
        told = cluster.environment(job)
        named = {key: text for key, text in told.items() if key.startswith("MEND_METRICS_")}
        config = config_from(named, monkeypatch)
        (container,) = job["template"]["spec"]["containers"]
        (port,) = (each for each in container["ports"] if each["name"] == "metrics")
        assert (config.metrics_host, config.metrics_port) == ("0.0.0.0", port["containerPort"])
        assert config.metrics_port == cluster.policies[0]["ingress"][-1]["ports"][0]["port"]


def test_the_witness_is_where_the_racks_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster("witness", tmp_path)
    job = next(iter(cluster.racks.values()))
    config = config_from(cluster.environment(job), monkeypatch)
    assert cluster.witness is not None
    (container,) = cluster.witness["template"]["spec"]["containers"]
    options = dict(each.split("=", 1) for each in container["args"])
    host, _, port = config.witness_addr.removeprefix("tcp://").rpartition(":")
    assert options["--bind"] == f"tcp://0.0.0.0:{port}"
    assert selected(cluster.services[host], cluster.names()["witness"])
    told = cluster.environment(cluster.witness)
    assert told[options["--racks"][2:-1]] == str(config.racks)
    assert told[options["--job-id"][2:-1]] == config.job_id


def test_gpus_are_asked_for_as_often_as_there_are_ranks(tmp_path: Path) -> None:
    for job in Cluster("gpu", tmp_path).racks.values():
        (container,) = job["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert f"--nproc-per-node={limits['nvidia.com/gpu']}" in container["args"]
