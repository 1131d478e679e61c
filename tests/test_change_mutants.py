"""Small edits come from the code alone, are the same each time, and meet the right tests."""

from __future__ import annotations

import pytest

from tests import change_mutants
from tests.change_mutants import ROOT, SIMULATOR, edits_in, find_tests
from tests.small_edits import choose, edits_of

SOURCE = '''
class Door:
    """Words."""

    limit: int = 3

    def admit(self, count: int, name: str = "none") -> None:
        """At most three."""
        if count >= self.limit and name:
            raise ValueError(f"{count + 1} are too many for {name}")
        self.last = name
        self.note(name)


def untouched(x: int) -> int:
    return max(x, 1)
'''


def kinds(lines: set[int] | None = None) -> list[tuple[str, str, str]]:
    return [(edit.kind, edit.old, edit.new) for edit in edits_of(SOURCE, "door.py", lines)]


def test_edits_of_changed_function_leave_words_and_other_functions_alone() -> None:
    both = "count >= self.limit and name"
    assert set(kinds({9})) == {
        ("condition negated", both, f"(not ({both}))"),
        ("and/or swapped", both, "(count >= self.limit or name)"),
        ("condition dropped", both, "(name)"),
        ("condition dropped", both, "(count >= self.limit)"),
        ("comparison flipped", "count >= self.limit", "count < self.limit"),
        ("boundary moved", "count >= self.limit", "count > self.limit"),
        ("raise dropped", 'raise ValueError(f"{count + 1} are too many for {name}")', "pass"),
        ("assignment dropped", "self.last = name", "pass"),
        ("early return", "self.last = name", "return"),
        ("call dropped", "self.note(name)", "pass"),
        ("early return", "self.note(name)", "return"),
    }
    assert ("function swapped", "max", "min") in kinds()


def test_edit_replaces_its_own_text_behind_letters_of_several_bytes() -> None:
    source = 'def f(x: int) -> bool:\n    return "\u00e4\u00f6" == "\u20ac" and x > 3\n'
    (moved,) = [edit for edit in edits_of(source, "f.py") if edit.kind == "boundary moved"]
    assert moved.applied(source) == source.replace("x > 3", "x >= 3")
    assert "-    return" in moved.diff(source)


def test_choice_is_the_same_wherever_a_function_stands_and_takes_from_all() -> None:
    moved = "\n\n# a comment\n" + SOURCE
    first = choose(edits_of(SOURCE, "door.py"), 4, lambda file: SOURCE)
    again = choose(edits_of(moved, "door.py"), 4, lambda file: moved)
    assert [(e.kind, e.new) for e in first] == [(e.kind, e.new) for e in again]
    assert {edit.function for edit in first} == {"Door.admit", "untouched"}
    assert len(first) == 4


def test_edit_that_is_no_other_program_is_not_chosen() -> None:
    source = "def f(x: int) -> None:\n    x += 1\n    yield x\n    return\n"
    texts = {e.applied(source) for e in choose(edits_of(source, "f.py"), 99, lambda file: source)}
    assert source not in texts
    for text in texts:
        compile(text, "f.py", "exec")


def test_mutants_since_an_unknown_commit_are_refused() -> None:
    with pytest.raises(SystemExit, match="nowhere"):
        change_mutants.edits_since("nowhere", 1)


def test_module_is_met_by_its_own_tests_then_by_those_of_its_users_else_by_the_simulator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, *wider = find_tests("src/mend/transport/socks.py")
    assert own[0] == "tests/unit/transport/test_socks.py"
    assert "tests/unit/transport/test_bulk_client.py" in wider[0]
    monkeypatch.setattr(change_mutants, "files", lambda *folders: ())
    assert find_tests("src/mend/transport/socks.py") == [SIMULATOR]


def test_every_module_has_edits_or_no_functions() -> None:
    """What cannot be parsed, or is named wrongly, would go unnoticed."""
    (edit, *_) = edits_in(["merge"], 1)
    assert edit.file == "src/mend/merge/__init__.py"
    (edit, *_) = edits_in(["transport.socks"], 3)
    assert edit.file == "src/mend/transport/socks.py"
    assert edit.applied((ROOT / edit.file).read_text(encoding="utf-8"))


@pytest.mark.slow  # a copy of the tree, and two starts of torch
def test_hunt_tells_survivors_from_caught_and_restores_its_copy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    edits = [
        edit
        for edit in edits_in(["transport.socks"], 99)
        if (edit.kind, edit.function) == ("raise dropped", "connect_through")
    ]
    assert len(edits) == 3
    assert change_mutants.hunt(edits, minutes=5, parallel=1) == 0
    said = capsys.readouterr().out
    assert said.count("without a mutant") == 1
    assert "3 of 3 mutants were caught" in said
