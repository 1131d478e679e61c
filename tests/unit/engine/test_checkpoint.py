"""What a checkpoint is refused for, and what may differ from the job that made it."""

from __future__ import annotations

from pathlib import Path
from urllib.error import URLError

import pytest

from mend import MendConfig
from mend.config.declared import Scope
from mend.engine.checkpoint.checkpoint import differing_fact, read_part, together
from mend.engine.io.rack import RackGroup
from mend.errors import CheckpointError


def test_a_job_may_go_on_under_another_exchange_plan() -> None:
    """Three racks that merged slices go on as two, which cannot; the bits are those of a mesh."""
    three = MendConfig(rack=0, racks=3, exchange_plan="sharded").facts(Scope.PLAN)
    two = MendConfig(rack=0, racks=2).facts(Scope.PLAN)
    assert differing_fact(three, two) == differing_fact(two, three) == ""
    other = MendConfig(rack=0, racks=2, outer_lr=0.5).facts(Scope.PLAN)
    assert differing_fact(three, other) == "outer_lr was 1, is 0.5 here"


def test_a_model_of_another_width_is_told_by_a_parameter() -> None:
    """The digest of all of them came first and says nothing."""
    then = (("shards of rank 0", "5f86"), ("param 0.weight", "64 float32"))
    now = (("shards of rank 0", "a1c0"), ("param 0.weight", "32 float32"))
    assert differing_fact(then, now) == "param 0.weight was 64 float32, is 32 float32 here"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "model.pt"), "model.pt: No space left on device"),
        (OSError(28, "No space left on device"), "save(step-8): OSError: [Errno 28] No space left"),
        (URLError("no route"), "save(step-8): URLError: <urlopen error no route>"),
    ],
)
def test_an_error_of_the_system_says_what_it_is_of(error: OSError, said: str) -> None:
    """A script may save into a store. What fails there names no file, and read `None: None`."""

    def save() -> None:
        raise error

    with pytest.raises(CheckpointError) as raised:
        together(RackGroup(None, 1.0), save, "save(step-8): ")
    assert str(raised.value).startswith(said)
    assert raised.value.__cause__ is error


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        read_part(path, 0, RackGroup(None, 1.0), ())
    return str(raised.value)


def test_a_folder_of_torch_s_checkpoint_is_told_from_an_empty_one(tmp_path: Path) -> None:
    said = f"there is no complete checkpoint in {tmp_path}"
    assert refusal(tmp_path) == said
    (tmp_path / ".metadata").touch()
    remedy = "it is one of torch.distributed.checkpoint: load a mend.SavedState of it"
    assert refusal(tmp_path) == f"{said}; {remedy}"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exit_in_save_is_announced_to_the_other_ranks(kind: type[BaseException]) -> None:
    """They waited for it until the collective timed out, 720 s by default."""
    announced: list[str] = []

    class Group(RackGroup):
        def gather(self, mine: str, kind: type[str]) -> list[str]:  # type: ignore[override]
            announced.append(mine)
            return [mine]

    def save() -> None:
        raise kind("Ctrl-C")

    with pytest.raises(kind):
        together(Group(None, 1.0), save)
    assert announced == [f"{kind.__name__}: Ctrl-C"]
