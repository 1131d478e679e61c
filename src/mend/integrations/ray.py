"""mend in Ray Train (v2): the workers of one `TorchTrainer` become racks.

    from mend.integrations.ray import MendTorchConfig

    trainer = TorchTrainer(
        train,  # calls mend.session(model, optimizer=optimizer), as under torchrun
        torch_config=MendTorchConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )

Each rack gets a process group of its own and its MEND_* variables. An actor beside Ray's controller
is the witness. Where a rack is one worker and dies, Ray replaces it alone: the others train on, and
it joins them. Otherwise Ray starts all workers again, and the script resumes from its checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.execution.worker_group import ReplicaGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mend.config.keyfile import is_loopback, line_of
from mend.config.sources import KEY_FILE
from mend.config.witness import serve_witness, witness_config
from mend.errors import ConfigError
from mend.transport.security import SECRET_BYTES


@dataclass
class MendTorchConfig(TorchConfig):
    """`ranks_per_rack`: workers of a rack, with consecutive world ranks; Ray counts those node by
    node. `witness`: run one on the node of Ray's controller. `key_file`: path of the job's key on
    every node; empty: a key is made for every start, and Ray carries it to the workers.

    All other settings: arguments of `mend.MendConfig` in the training function, or MEND_* in
    `env_vars` of Ray's `runtime_env`. Ray fails with ConfigError as the cause where the workers do
    not make whole racks.
    """

    ranks_per_rack: int = 1
    witness: bool = True
    key_file: str = ""

    @property
    def backend_cls(self) -> type[_RackBackend]:
        return _ReplacedAlone if self.ranks_per_rack == 1 else _RackBackend


@dataclass
class _Job:
    """One start of all racks. It has a key of its own, so that no process of a former start can
    join. `addresses`: of the racks."""

    name: str
    key: str
    addresses: list[str]
    witness: str = ""


class _RackBackend(_TorchBackend):  # type: ignore[misc]  # has no types
    """Starts racks as Ray's backend. Ray creates one per controller. If a worker fails, Ray starts
    all of them again."""

    def __init__(self) -> None:
        super().__init__()
        self._job: _Job | None = None
        self._witness: Any = None

    def on_start(self, worker_group: Any, backend_config: MendTorchConfig) -> None:
        """Called for all workers, or for one that replaces a dead rack of the running job."""
        job = self._job
        if isinstance(worker_group, ReplicaGroup) and job is not None:
            rack = worker_group.get_workers()[0].distributed_context.world_rank
            job.addresses[rack] = _free_address(worker_group)
            self._start_rack(job, rack, worker_group, backend_config)
            return
        racks = _racks_of(worker_group, backend_config.ranks_per_rack)
        self._job = job = self._begin(racks, backend_config)
        for rack, workers in enumerate(racks):
            self._start_rack(job, rack, workers, backend_config)

    def _begin(self, racks: list[ReplicaGroup], config: MendTorchConfig) -> _Job:
        key = "" if config.key_file else line_of(os.urandom(SECRET_BYTES))
        job = _Job(f"ray-{os.urandom(4).hex()}", key, [_free_address(rack) for rack in racks])
        if self._witness is not None:
            ray.kill(self._witness)
        if config.witness:
            job.witness = _address(*get_address_and_port())
            actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Witness)
            here = ray.get_runtime_context().get_node_id()  # it lives as long as the controller
            place = NodeAffinitySchedulingStrategy(node_id=here, soft=False)
            self._witness = actor.options(scheduling_strategy=place).remote()
            variables = _key_variables(job, config)
            self._witness.serve.remote(job.witness, len(racks), job.name, variables, job.key)
        return job

    def _start_rack(
        self, job: _Job, rack: int, workers: ReplicaGroup, config: MendTorchConfig
    ) -> None:
        """Make the rack's process group and name its place in the job."""
        super().on_start(workers, config)  # also sets RANK and WORLD_SIZE, among all workers
        address = job.addresses[rack]
        shared = {
            "MEND_RACK": str(rack),
            "MEND_RACKS": str(len(job.addresses)),
            "MEND_JOB_ID": job.name,
            "MEND_SIDEBAND_ADDR": _bind(address),
            "MEND_SIDEBAND_PEERS": ",".join(f"{n}={at}" for n, at in enumerate(job.addresses)),
            "MEND_WITNESS_ADDR": job.witness,
            "WORLD_SIZE": str(len(workers)),
            **_key_variables(job, config),
        }
        done = []
        for rank, worker in enumerate(workers.get_workers()):
            own = {"RANK": str(rank), "MEND_ADVERTISE_HOST": worker.metadata.node_ip}
            done.append(worker.execute_async(_take_place, {**shared, **own}, job.key))
        ray.get(done)


class _ReplacedAlone(_RackBackend):
    """The same for racks of one worker, the only replica groups that Ray replaces one by one."""

    has_replica_groups = True


class Witness:
    """The actor that is the witness."""

    def serve(
        self, address: str, racks: int, job_id: str, variables: dict[str, str], key: str
    ) -> None:
        """Serve until all racks have left."""
        _take_place(variables, key)
        config = witness_config(address, racks, job_id)
        serve_witness(config, lambda line: print(f"mend witness {line}", flush=True))


def _racks_of(worker_group: Any, ranks: int) -> list[ReplicaGroup]:
    """Groups of consecutive workers, in which functions can run. Raises ConfigError."""
    workers = worker_group.get_workers()
    if ranks < 1 or len(workers) % ranks:
        raise ConfigError(
            "ranks_per_rack", ranks, f"{len(workers)} workers do not make whole racks",
            "Set num_workers of the ScalingConfig to a multiple of it.",
        )  # fmt: skip
    resources = worker_group.get_resources_per_worker()
    firsts = range(0, len(workers), ranks)
    return [ReplicaGroup(workers[first : first + ranks], resources) for first in firsts]


def _free_address(rack: ReplicaGroup) -> str:
    """A free address for a rack's leader, on the node of its first worker."""
    return _address(*rack.execute_single(0, get_address_and_port))


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _bind(address: str) -> str:
    """The address at which the ranks of a rack listen, each on its own node."""
    if is_loopback(address):
        return address
    everywhere = "[::]" if "[" in address else "0.0.0.0"
    return f"tcp://{everywhere}:{address.rpartition(':')[2]}"


def _key_variables(job: _Job, config: MendTorchConfig) -> dict[str, str]:
    return {} if job.key else {KEY_FILE: config.key_file}


def _take_place(variables: dict[str, str], key: str) -> None:
    """Set variables in a worker or the witness. The file of `key` is in memory and ends with the
    process."""
    os.environ.update(variables)
    if key:
        file = os.memfd_create("mend-key")
        os.fchmod(file, 0o600)
        os.write(file, key.encode())
        os.environ[KEY_FILE] = f"/proc/self/fd/{file}"
