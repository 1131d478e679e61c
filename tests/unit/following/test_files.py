"""A file of a version is whole or not there; a module is filled or left alone; workers load
files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mend.errors import CheckpointError, ConfigError, UsageError
from mend.events.kinds import Progress
from mend.following import Version
from mend.following.files import PATTERN, VersionFiles, newest_version, read_version
from mend.integrations.vllm import InitInfo, MendWeightTransferEngine, UpdateInfo
from mend.status.event_log import EventLog
from mend.tools.report.read import read_run


def version(number: int, **changes: Any) -> Version:
    tensors = {
        "a": torch.full((3, 2), float(number)),
        "b": torch.full((4,), number, dtype=torch.bfloat16),
        "none": torch.zeros(0, 2),
    }
    fields: dict[str, Any] = {
        "job": "run7", "number": number, "versions": (number,), "digest": f"{number:064x}",
        "step": 8 * number, "tensors": tensors, "changed": frozenset(tensors),
        "bytes_received": 0, "seconds": 0.0, "missed": 0,
    }  # fmt: skip
    return Version(**{**fields, **changes})


def test_file_gives_the_version_back(tmp_path: Path) -> None:
    path = VersionFiles(tmp_path / "new" / "folder", 2).write(version(7))
    about, tensors = read_version(path)
    assert (about.job, about.number, about.step, about.versions) == ("run7", 7, 56, (7,))
    for name, tensor in version(7).tensors.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_recorded_values_are_in_the_report_of_the_job(tmp_path: Path) -> None:
    events = EventLog({"rack": 0, "rank": 0}, tmp_path)
    events.note(Progress(1, 10, 1, 0.0, 0, 0))
    events.close()
    version(1).record(tmp_path, held_out_merged=2.5)
    version(2).record(tmp_path, held_out_merged=1.5)
    facts = read_run(tmp_path)
    assert facts.ranks[0, 0].curves["held_out_merged"].values == [2.5, 1.5]
    assert facts.notes == []
    with pytest.raises(UsageError, match="item"):
        version(3).record(tmp_path, held_out_merged=torch.ones(()))  # type: ignore[arg-type]


def test_newest_files_are_kept_by_age(tmp_path: Path) -> None:
    """After a lineage that goes back, a lower number is the newer one."""
    files = VersionFiles(tmp_path, 2)
    for order, number in enumerate((5, 6, 4)):
        os.utime(files.write(version(number)), ns=(order, order))
    kept = files.write(version(5, digest="f" * 64))
    assert {path.name[8:16] for path in tmp_path.glob(PATTERN)} == {"00000004", "00000005"}
    assert newest_version(tmp_path) == kept


def test_prune_with_files_of_others_keeps_them(tmp_path: Path) -> None:
    """The last versions of another job, and what is not a version."""
    last = VersionFiles(tmp_path, 1).write(version(500, job="run6"))
    broken = [tmp_path / f"version-{name}.safetensors" for name in ("cut", "long", "text")]
    for path, data in zip(
        broken, (b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"{}"), strict=True
    ):
        path.write_bytes(data)
    files = VersionFiles(tmp_path, 1)
    written = [files.write(version(number)) for number in (0, 1, 2)]
    assert {*tmp_path.iterdir()} == {last, *broken, written[-1]}


def test_full_disk_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    files = VersionFiles(tmp_path, 1)
    before = files.write(version(1))
    large = version(2, tensors={"a": torch.zeros(100_000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="large"):
            files.write(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*tmp_path.iterdir()] == [before]
    assert read_version(before)[0].number == 1
    files.write(large)


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_below_one_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ConfigError, match="keep"):
        VersionFiles(tmp_path, keep)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    path = VersionFiles(tmp_path, 1).write(version(1))
    data = path.read_bytes()
    for harmed in (b"", data[:20], data[:-30], b"\xff" * 8 + data[8:]):
        path.write_bytes(harmed)
        with pytest.raises(CheckpointError, match="is not a version"):
            read_version(path)


class Model(nn.Module):
    def __init__(self, last: Tensor | None = None) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, 2))
        self.b = nn.Parameter(torch.zeros(4))
        self.register_buffer("none", torch.zeros(0, 2))
        if last is not None:
            self.b = nn.Parameter(last)
        self.own = nn.Parameter(torch.ones(2))


def test_module_is_filled_in_its_own_memory_and_type() -> None:
    model = Model()
    before = model.a.data_ptr()
    version(3).fill(model)
    assert model.a.data_ptr() == before
    assert model.a.tolist() == [[3.0, 3.0]] * 3
    assert (model.b.tolist(), model.b.dtype) == ([3.0] * 4, torch.float32)
    assert model.own.tolist() == [1.0, 1.0]


def test_copy_that_fails_halfway_leaves_the_former_values() -> None:
    """Elements that share one place cannot be written."""
    model = Model(torch.zeros(1).expand(4))
    with pytest.raises(RuntimeError):
        version(3).fill(model)
    assert model.a.tolist() == [[0.0, 0.0]] * 3


def test_module_that_does_not_fit_is_not_touched() -> None:
    model = Model()
    with pytest.raises(UsageError, match="no other"):
        version(3, tensors={"a": torch.ones(3, 2), "other": torch.ones(1)}).fill(model)
    with pytest.raises(UsageError, match=r"shape \(4,\)"):
        version(3, tensors={"a": torch.ones(3, 2), "b": torch.ones(5)}).fill(model)
    assert model.a.tolist() == [[0.0, 0.0]] * 3


def test_lock_is_held_for_the_copy_alone() -> None:
    model, held = Model(), list[float]()

    class Lock:
        def __enter__(self) -> None:
            held.append(float(model.a[0, 0]))

        def __exit__(self, *_: object) -> None:
            held.append(float(model.a[0, 0]))

    version(3).fill(model, Lock())
    assert held == [0.0, 3.0]


class Worker:
    """What a worker of vLLM does: it calls the engine with parsed infos."""

    class Served:
        def __init__(self) -> None:
            self.weights: dict[str, Tensor] = {}
            self.fails = False

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            for name, tensor in weights:
                self.weights[name] = tensor
                if self.fails:
                    raise RuntimeError("out of memory")
            return set(self.weights)

    def __init__(self) -> None:
        self.engine = MendWeightTransferEngine()
        self.engine.model = self.model = self.Served()

    def update(self, **info: str) -> None:
        self.engine.start_weight_update()
        self.engine.receive_weights(self.engine.update_info_cls(**info))
        self.engine.finish_weight_update()


def test_workers_load_one_version_from_the_folder(tmp_path: Path) -> None:
    files, workers = VersionFiles(tmp_path, 3), [Worker(), Worker()]
    path = files.write(version(1))
    files.write(version(2))
    for worker in workers:
        worker.engine.init_transfer_engine(InitInfo(str(tmp_path)))
        worker.update(file=path.name)
        assert worker.engine.loaded is not None
        assert worker.engine.loaded.number == 1
        assert float(worker.model.weights["a"][0, 0]) == 1.0
    workers[0].update()
    assert float(workers[0].model.weights["a"][0, 0]) == 2.0
    workers[0].engine.shutdown()
    with pytest.raises(UsageError, match="before init_transfer_engine"):
        workers[0].update()


def test_half_a_version_is_never_served(tmp_path: Path) -> None:
    worker = Worker()
    with pytest.raises(UsageError):
        worker.engine.receive_weights(UpdateInfo())
    VersionFiles(tmp_path, 1).write(version(1))
    worker.engine.init_transfer_engine(InitInfo(str(tmp_path)))
    with pytest.raises(UsageError, match="not the name of a file"):
        worker.update(file="../secret")
    worker.update()
    worker.model.fails = True
    with pytest.raises(RuntimeError):
        worker.update()
    with pytest.raises(UsageError, match="load one first"):
        worker.engine.finish_weight_update()
    with pytest.raises(UsageError, match="mend follow"):
        worker.engine.trainer_send_weights(None, None)


def test_second_update_without_weights_is_refused(tmp_path: Path) -> None:
    """It passed: the version of the first one was loaded."""
    worker = Worker()
    VersionFiles(tmp_path, 1).write(version(1))
    worker.engine.init_transfer_engine(InitInfo(str(tmp_path)))
    worker.update()
    worker.engine.start_weight_update()
    with pytest.raises(UsageError, match="load one first"):
        worker.engine.finish_weight_update()
    worker.update()
    assert worker.engine.loaded is not None
