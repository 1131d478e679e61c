"""A sweep on disk: whatever stops it costs the cell that ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.delay_sweep.plan import BLOCKING, NONE
from benchmarks.delay_sweep.state import NAME, RUNS, State
from mend.errors import ConfigError
from tests.unit.benchmarks.sweeps import done, measured, settings

FIRST = done(0, 0.0, NONE, measured(20.0, losses={"rack 0 rank 0": [0.1 + 0.2, float("nan")]}))
SECOND = done(0, 100.0, BLOCKING, measured(31.0, 110.0))


def begun(out: Path) -> State:
    state = State.begin(out, settings(), fresh=False)
    state.add(FIRST)
    state.add(SECOND)
    return state


def test_a_sweep_goes_on_behind_its_finished_cells(tmp_path: Path) -> None:
    before = begun(tmp_path / "out")
    after = State.begin(tmp_path / "out", settings(), fresh=False)
    assert after.sweep == before.sweep
    assert after.find(FIRST.cell) is not None
    assert after.find(done(1, 0.0, NONE, FIRST.measured).cell) is None
    assert repr(after.done) == repr([FIRST, SECOND]), "to the last bit of a loss"


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_line_that_was_being_written_when_the_power_failed_is_run_again(
    tmp_path: Path, cut: int
) -> None:
    begun(tmp_path)
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-cut])
    state = State.begin(tmp_path, settings(), fresh=False)
    assert [one.cell for one in state.done] == [FIRST.cell]
    state.add(SECOND)
    assert len(State.load(tmp_path).done) == 2, "what is appended begins a line of its own"


def test_other_settings_are_not_mixed_into_it(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(ConfigError, match=r"seeds was 2 and is 5.*--fresh"):
        State.begin(tmp_path, settings(seeds=5), fresh=False)
    assert len(State.load(tmp_path).done) == 2
    (tmp_path / RUNS / "old").mkdir(parents=True)
    assert State.begin(tmp_path, settings(seeds=5), fresh=True).done == []
    assert not (tmp_path / RUNS).exists()


def test_a_first_try_that_failed_stands_in_nobodys_way(tmp_path: Path) -> None:
    State.begin(tmp_path, settings(command=("trian.py",)), fresh=False)
    assert State.begin(tmp_path, settings(), fresh=False).sweep == settings()
    assert State.load(tmp_path).sweep == settings()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / RUNS).mkdir()
    (tmp_path / RUNS / "thesis.tex").write_text("\\title")
    with pytest.raises(ConfigError, match="no sweep is in it"):
        State.begin(tmp_path, settings(), fresh=False)
    State.begin(tmp_path, settings(), fresh=True)
    assert (tmp_path / RUNS / "thesis.tex").exists()


def test_a_table_of_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=NAME):
        State.load(tmp_path)
    (tmp_path / NAME).write_text('{"hash": "cut')
    with pytest.raises(ConfigError, match=NAME):
        State.load(tmp_path)


@pytest.mark.parametrize("damage", [('"seeds"', '"repeats"'), ('"mode"', '"modus"'), ("{", "[")])
def test_a_file_of_another_version_is_refused_in_a_sentence(
    tmp_path: Path, damage: tuple[str, str]
) -> None:
    begun(tmp_path)
    path = tmp_path / NAME
    path.write_text(path.read_text().replace(*damage))
    with pytest.raises(ConfigError, match="not what this version writes"):
        State.begin(tmp_path, settings(), fresh=False)
    assert State.begin(tmp_path, settings(), fresh=True).done == []
