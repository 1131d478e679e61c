"""The files of a checkpoint: what was written comes back, and nothing else does."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mend.engine.checkpoint.checkpoint_files import (
    File,
    Manifest,
    State,
    begin_part,
    check_files,
    complete_part,
    end_part,
    newest_checkpoint,
    rack_folder,
    rank_file,
    read_manifest,
    read_rank,
    summed,
    write_rank,
)
from mend.engine.state.fragment_state import FragmentProgress, OfferProgress, RankProgress
from mend.errors import CheckpointError

PROGRESS = RankProgress(
    7, 70, 60, 0, (("offer was late", 2),),
    (FragmentProgress(3, 5, "ab" * 32, 4, 60, 6, 6, 2, "cd" * 32),),
)  # fmt: skip
STATE = State(PROGRESS, (OfferProgress(0, 4, 2, 6, 10, 1, 70, 7),))
TENSORS = {"0.anchor": torch.randn(9), "0.delta": torch.randn(5), "0.residual": torch.empty(0)}


def manifest(rack: int = 0, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "mend": "1", "name": "one", "lineage": "ab" * 32, "number": 1, "racks": (0, 1),
        "rack": rack, "ranks": 1, "wall_ns": 5, "step": 7, "open_tokens": 10, "versions": (3,),
        "rounds": (5,), "digests": (("ab" * 32,),), "facts": (("model", "tiny"),), "files": (),
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


def written(folder: Path, rack: int = 0, *, complete: bool = True, **changes: Any) -> Manifest:
    part = folder / f".rack-{rack}.part"
    begin_part(part)
    write_rank(part / rank_file(0), STATE, TENSORS)
    made = manifest(rack, files=tuple(summed(part, [rank_file(0)], sync=True)), **changes)
    end_part(part, made)
    if complete:
        complete_part(folder, rack)
    return made


def test_written_checkpoint_is_read_back(tmp_path: Path) -> None:
    made = written(tmp_path / "one")
    assert read_manifest(tmp_path / "one", 0) == made
    mine = rack_folder(tmp_path / "one", 0)
    check_files(mine, made, 0, 1)
    state, tensors = read_rank(mine, made, 0)
    assert state == STATE
    assert tensors.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        assert tensors[name].view(torch.int32).tolist() == values.view(torch.int32).tolist()


def test_rank_file_is_readable_by_the_safetensors_library(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    write_rank(tmp_path / "one", STATE, TENSORS)
    found = safetensors.load_file(tmp_path / "one")
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in TENSORS.items()
    }


@pytest.mark.parametrize("seed", range(200))
def test_no_damage_gets_through_and_none_is_another_exception(tmp_path: Path, seed: int) -> None:
    """Bits flipped, bytes cut off, added, or taken out anywhere; the manifest says what it was."""
    made, chance = written(tmp_path / "one"), random.Random(seed)
    path = rack_folder(tmp_path / "one", 0) / rank_file(0)
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    harm = chance.choice(["flip", "cut", "add", "take"])
    if harm == "flip":
        data[place] ^= 1 << chance.randrange(8)
    elif harm == "cut":
        del data[place:]
    elif harm == "add":
        data[place:place] = chance.randbytes(chance.randint(1, 9))
    else:
        del data[place : place + 8]
    path.write_bytes(bytes(data))
    # As if the manifest were of the damaged file, too: what is read must still fit together.
    sized = manifest(files=(File(rank_file(0), len(data), made.files[0].sha256),))
    with pytest.raises(CheckpointError):
        read_rank(path.parent, sized, 0)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [2**61], "data_offsets": [0, 2**63]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    ],
    ids=["type", "negative", "huge", "gap", "rest"],
)
def test_a_header_that_lies_about_its_tensors_is_refused(
    tmp_path: Path, entry: dict[str, Any]
) -> None:
    """With a manifest that was made for it: whoever wrote both cannot have much memory taken."""
    path = tmp_path / rank_file(0)
    write_rank(path, STATE, {})
    size = int.from_bytes(path.read_bytes()[:8], "little")
    kept = json.loads(path.read_bytes()[8 : 8 + size])
    head = json.dumps({**kept, "0.anchor": entry}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    made = manifest(files=tuple(summed(tmp_path, [rank_file(0)])))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_rank(tmp_path, made, 0)


def test_a_header_without_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / rank_file(0)
    path.write_bytes((2**63).to_bytes(8, "little") + bytes(100))
    made = manifest(files=tuple(summed(tmp_path, [rank_file(0)])))
    with pytest.raises(CheckpointError, match="a header of"):
        read_rank(tmp_path, made, 0)


def test_a_manifest_names_no_files_elsewhere(tmp_path: Path) -> None:
    stranger = (File("../../secret", 1, ""),)
    part = tmp_path / "one" / ".rack-0.part"
    begin_part(part)
    end_part(part, manifest(files=stranger))
    complete_part(tmp_path / "one", 0)
    with pytest.raises(CheckpointError, match=r"names the file '\.\./\.\./secret'"):
        read_manifest(tmp_path / "one", 0)


def test_the_newest_is_the_last_that_is_complete(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nowhere") is None
    written(tmp_path / "b", wall_ns=1)
    written(tmp_path / "a", wall_ns=2)
    written(tmp_path / "c", wall_ns=3, complete=False)
    (tmp_path / "file").touch()
    assert newest_checkpoint(tmp_path) == tmp_path / "a"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        read_manifest(tmp_path / "c", 0)


def test_newest_checkpoint_of_a_lineage_is_found_where_the_clock_was_set_back(
    tmp_path: Path,
) -> None:
    written(tmp_path / "earlier", number=1, wall_ns=9)
    written(tmp_path / "later", number=2, wall_ns=5)
    assert newest_checkpoint(tmp_path) == tmp_path / "later"
    written(tmp_path / "resumed", number=1, wall_ns=7, lineage="ef" * 32)
    assert newest_checkpoint(tmp_path) == tmp_path / "resumed"


def test_one_rack_that_says_so_makes_it_complete(tmp_path: Path) -> None:
    """It does once all have written; the others may have been killed before they could say it."""
    folder = tmp_path / "one"
    made = [written(folder, rack, complete=False) for rack in (0, 1)]
    complete_part(folder, 1)
    assert newest_checkpoint(tmp_path) == folder
    assert [read_manifest(folder, rack) for rack in (0, 1)] == made
    assert read_manifest(folder, 2) is None


def test_manifest_of_another_job_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    written(folder, 1, complete=False, lineage="cd" * 32)
    written(folder, 0)
    assert read_manifest(folder, 1) is None


def test_a_complete_part_of_an_older_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    """It was taken for a part that is lost: the rack began with a copy, and its work was gone."""
    folder = tmp_path / "one"
    written(folder, 1, complete=False, number=1, wall_ns=1)
    written(folder, 0, complete=False, number=2, wall_ns=9)
    complete_part(folder, 0)
    complete_part(folder, 1)
    with pytest.raises(CheckpointError, match=r"two checkpoints: rack-0 .* the older rack-1"):
        read_manifest(folder, 1)


def test_a_part_that_is_not_complete_is_replaced_and_a_complete_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    written(folder, complete=False)
    again = written(folder, wall_ns=9)
    assert read_manifest(folder, 0) == again
    with pytest.raises(CheckpointError, match="holds a complete checkpoint"):
        begin_part(folder / ".rack-0.part")


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy() -> None:
    said = r"folder='/proc/ck': cannot be made \(No such file or directory\)\. Give checkpoint\(\)"
    with pytest.raises(CheckpointError, match=said):
        begin_part(Path("/proc/ck/.rack-0.part"))


def test_rank_file_is_on_disk_whole_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without fsync a power cut leaves a complete checkpoint with an empty file."""
    synced: list[tuple[int, int]] = []

    def fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced.append((found.st_ino, found.st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "rank"
    write_rank(path, STATE, {"a": torch.ones(1000)})
    assert synced == [(path.stat().st_ino, path.stat().st_size)]
