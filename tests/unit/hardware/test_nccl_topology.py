"""A topology that NCCL wrote: which GPUs are near each other, which cores and cards near a GPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mend.errors import ConfigError
from mend.hardware import nccl_topology
from mend.hardware.nccl_topology import (
    Dump,
    announce,
    parse_dump,
    parse_mask,
    plain_bus_id,
    read_dump,
)
from tests.unit.hardware.dumps import CLOUD, GPUS, dgx, sockets


def islands(dump: Dump) -> list[str]:
    return [dump.island(gpu.bus_id) for gpu in dump.gpus]


def test_eight_gpus_on_two_processors() -> None:
    dump = parse_dump(dgx())
    assert [gpu.bus_id for gpu in dump.gpus] == [f"0000:{bus}:00.0" for bus in GPUS]
    assert [gpu.numa for gpu in dump.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [gpu.rank for gpu in dump.gpus] == [gpu.dev for gpu in dump.gpus] == list(range(8))
    first, last = dump.gpus[0], dump.gpus[-1]
    assert first.cores == {*range(48), *range(96, 144)}
    assert last.cores == {*range(48, 96), *range(144, 192)}
    assert first.switch == "0000:16:00.0"
    assert first.links == ("nvswitch",)
    assert [gpu.nics for gpu in dump.gpus] == [(f"mlx5_{dev}",) for dev in range(8)], (
        "the card on the same bridge, not the others of the same processor"
    )


def test_gpus_joined_by_nvswitches_are_one_island() -> None:
    assert islands(parse_dump(dgx())) == ["0000:18:00.0"] * 8


def test_processors_without_nvlink_are_islands() -> None:
    dump = parse_dump(sockets())
    assert islands(dump) == ["0000:17:00.0", "0000:b1:00.0"]
    assert [gpu.nics for gpu in dump.gpus] == [("eth0",), ()], "the other socket's card is not near"
    assert dump.gpus[1].cores == set(range(16, 32))


def test_an_nvlink_between_two_gpus_joins_them() -> None:
    link = '<nvlink target="0000:b1:00.0" count="4" tclass="0x030200"/>'
    text = sockets().replace('rank="0"/>', f'rank="0">{link}</gpu>')
    assert islands(parse_dump(text)) == ["0000:17:00.0", "0000:17:00.0"]


def test_a_virtual_machine_shows_little_and_nothing_is_invented() -> None:
    dump = parse_dump(CLOUD)
    assert len(dump.gpus) == 2
    for gpu in dump.gpus:
        assert (gpu.numa, gpu.cores, gpu.switch, gpu.links) == (None, None, "", ())
        assert gpu.nics == ("mlx5_0",), "as far as it shows, the card is equally near"
    assert islands(dump) == ["0000:05:00.0", "0000:05:00.0"]


def test_a_gpu_is_found_as_cuda_writes_its_bus() -> None:
    dump = parse_dump(dgx())
    assert dump.gpu("00000000:DB:00.0") is dump.gpus[-1]
    assert dump.gpu("0000:ff:00.0") is None
    assert dump.island("0000:ff:00.0") == ""
    assert plain_bus_id("00010000:1B:00.0 ") == "10000:1b:00.0"


def test_several_machines_in_one_dump_are_kept_apart() -> None:
    """With NVLink between machines NCCL dumps all of them, and their bus ids are the same."""
    one, other = sockets(), sockets().replace("0x16fe256e956b115c", "0x2")
    both = one.replace("</system>", "") + other.replace('<system version="1">', "")
    dump = parse_dump(both)
    assert len(dump.gpus) == 4
    assert dump.gpu("0000:b1:00.0") is not None, "both say the same of it"
    differing = both[::-1].replace("ffff0000"[::-1], "0ff00000"[::-1], 1)[::-1]
    assert parse_dump(differing).gpu("0000:b1:00.0") is None, "which of them is this machine?"


BOMB = """<!DOCTYPE system [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<system version="1">&b;</system>"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "broken XML"),
        ("not a dump", "broken XML"),
        ("<system version='1'><cpu></system>", "mismatched tag"),
        (dgx()[:700], "broken XML"),
        (BOMB, "DOCTYPE"),
        ('<!DOCTYPE system SYSTEM "file:///etc/passwd"><system version="1"/>', "DOCTYPE"),
        ("<graphs version='1'/>", "begins with <graphs>"),
        ("<system version='7'/>", "begins with <system>, not"),
        ("<system version='1'>" + "<pci>" * 100, "nested more than 64 deep"),
        ("<system version='1'>" + "<cpu/>" * 20_001, "more than 20000 elements"),
        (" " * (4 << 20) + "<system version='1'/>", "larger than 4 MiB"),
    ],
)
def test_invalid_dump_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_dump(text)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_raise_valueerror(data: bytes) -> None:
    for text in (data, b'<system version="1">' + data + b"</system>"):
        try:
            parse_dump(text)
        except ValueError:
            continue


def test_odd_places_and_numbers_are_not_taken_for_gpus() -> None:
    text = """<system version="1"><gpu dev="0"/><cpu numaid="x" affinity="0-15"><nvlink target=""/>
    <pci busid="0000:01:00.0"><gpu dev="99999999999999999999" rank=""/></pci></cpu></system>"""
    (gpu,) = parse_dump(text).gpus
    assert (gpu.dev, gpu.rank, gpu.numa, gpu.cores) == (None, None, None, None)


@pytest.mark.parametrize(
    ("mask", "cores"),
    [
        ("3", {0, 1}), ("00000003,00000000", {32, 33}),
        ("0003FF,f0003fff", {*range(14), *range(28, 42)}), ("0", None), ("", None), ("0-15", None),
        ("123456789", None), ("0x3", None),
    ],
)  # fmt: skip
def test_masks_are_read_as_the_kernel_writes_them(mask: str, cores: set[int] | None) -> None:
    assert parse_mask(mask) == cores


def test_a_file_is_read_and_a_bad_one_named(tmp_path: Path) -> None:
    path = tmp_path / "topo.xml"
    path.write_text(dgx())
    assert len(read_dump(path).gpus) == 8
    path.write_text(BOMB)
    with pytest.raises(
        ConfigError, match=r"--topology='.*topo\.xml': is not an NCCL topology: a DOC"
    ):
        read_dump(path, "--topology")
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        read_dump(tmp_path / "none.xml")


def test_no_more_than_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_topology, "DUMP_BYTES_MAX", 100)
    path = tmp_path / "topo.xml"
    path.write_text(dgx())
    with pytest.raises(ConfigError, match="larger than"):
        read_dump(path)


def test_a_choice_nobody_made_is_shown_without_asking(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mend")
    announce(2, 4, "hosts (a, b)", found=True)
    announce(2, 4, "ranks_per_rack=4", found=False)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    line = 'mend rank=0 rack-mesh racks=2 ranks_per_rack=4 source="hosts (a, b)"'
    assert caplog.records[0].getMessage() == line


@pytest.mark.parametrize("what", ["encoding", "pipe", "folder"])
def test_unreadable_dump_is_refused_without_waiting(tmp_path: Path, what: str) -> None:
    path = tmp_path / "topo.xml"
    if what == "encoding":
        path.write_text('<?xml version="1.0" encoding="rot13"?><system version="1"/>')
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ConfigError):
        read_dump(path)


def test_more_gpus_than_any_machine_has_are_refused() -> None:
    one = '<pci busid="{0:04x}:00:00.0"><gpu dev="0"/></pci>'
    text = '<system version="1"><cpu numaid="0">{}</cpu></system>'
    many = "".join(one.format(i) for i in range(1024))
    dump = parse_dump(text.format(many))
    assert len(dump.gpus) == 1024
    assert {dump.island(dump.gpus[i].bus_id) for i in (0, 1, 1023)} == {"0000:00:00.0"}
    with pytest.raises(ValueError, match="1025 GPUs"):
        parse_dump(text.format(many + one.format(1024)))
