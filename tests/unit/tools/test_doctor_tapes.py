"""What the tapes of an earlier run say of its plan and sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mend.coordination.machines import Parts
from mend.errors import TapeError
from mend.tools import app
from mend.tools.doctor.tapes import of_planned, planned_in
from mend.trace import writer as trace_writer
from mend.trace.reader import read_header
from mend.types import MB, WITNESS, Member, Peer


def written(
    folder: Path, rack: int, rank: int, plan: str, sizes: tuple[int, ...], moments: int = 0
) -> Path:
    header = trace_writer.header_of(
        "job", Parts(Peer(rack, rank), Member(rack, 7)), plan=plan, payload_bytes=sizes,
        config={"payload_dtype": "float32"}, moments=moments,
    )  # fmt: skip
    writer = trace_writer.TapeWriter(folder, header, MB, lambda *_: None)
    writer.close()
    return folder / f"tape-rack{rack}-rank{rank}.mend"


def test_plans_and_sizes_by_rack(tmp_path: Path) -> None:
    for rack in (0, 1):
        for rank in (0, 1):
            written(tmp_path, rack, rank, "ab" * 32, (400, 200))
    written(tmp_path, WITNESS, 0, "", ())
    found = planned_in(tmp_path)
    assert [(each.rack, each.params, each.ranks) for each in found] == [(0, 300, 2), (1, 300, 2)]
    (told,) = of_planned(found)
    assert told.severity == "ok"
    assert "rack 0, 1" in told.found


def test_moments_are_no_parameters(tmp_path: Path) -> None:
    written(tmp_path, 0, 0, "ab" * 32, (400, 200, 400, 200), moments=2)
    assert [each.params for each in planned_in(tmp_path)] == [150]


def test_plans_that_differ_are_a_problem(tmp_path: Path) -> None:
    written(tmp_path, 0, 0, "ab" * 32, (400,))
    written(tmp_path, 1, 0, "cd" * 32, (400,))
    (told,) = of_planned(planned_in(tmp_path))
    assert told.severity == "problem"
    assert "rack 0: abababababab; rack 1: cdcdcdcdcdcd" in told.found


def test_what_is_no_tape_is_told_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="no tape in there"):
        planned_in(tmp_path)
    path = written(tmp_path, 0, 0, "ab", (4,))
    whole = path.read_bytes()
    for spoiled in (b"", whole[:12], whole[:30], whole[:40] + b"\xff" + whole[41:]):
        path.write_bytes(spoiled)
        with pytest.raises(TapeError, match=r"tape-rack0-rank0\.mend"):
            read_header(path)


def test_the_size_of_the_model_comes_from_the_tapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks of each rack, the tape of one is here."""
    monkeypatch.setenv("MEND_RANKS_PER_RACK", "2")
    written(tmp_path, 0, 0, "ab" * 32, (4_000_000,))
    answer = CliRunner().invoke(app, ["doctor", "--json", "--run", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.output)["memory"]["params"] == 2_000_000
    (tmp_path / "witness").mkdir()
    written(tmp_path / "witness", WITNESS, 0, "", ())
    answer = CliRunner().invoke(app, ["doctor", "--run", str(tmp_path / "witness")])
    assert "do not say how large the model is" in answer.output
