"""What is no checkpoint at all is refused by its type, before the job is joined."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import mend
from mend.engine.checkpoint.saved_state import source_of
from mend.errors import UsageError


@pytest.mark.parametrize(
    ("resume", "type_"),
    [
        (3, "an int"),
        (True, "a bool"),
        ([], "a list"),
        ({"rack-0-rank-0": {}}, "a dict"),
        (b"cuts", "a bytes"),
    ],
)
@pytest.mark.parametrize("exchange", [True, False])
def test_mend_init_refuses_to_resume_what_is_no_checkpoint(
    resume: Any, type_: str, exchange: bool
) -> None:
    said = (
        f"resume is {type_}; it takes a folder of runtime.checkpoint (str or Path), or a "
        "mend.SavedState that torch.distributed.checkpoint has loaded"
    )
    config = mend.MendConfig(rack=0, racks=1, exchange=exchange)
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        mend.mend_init(nn.Linear(2, 1), config, resume=resume)


def test_an_empty_name_is_not_the_working_directory() -> None:
    with pytest.raises(UsageError, match=r"^resume is ''; name a folder, or leave it out"):
        source_of("")


def test_a_folder_may_be_a_string() -> None:
    assert source_of(None) is None
    assert source_of("cuts") == source_of(Path("cuts")) == Path("cuts")


@pytest.mark.parametrize("given", [{}, 3, None, nn.Linear(2, 1)])
def test_a_saved_state_is_of_a_folder_or_a_reader(given: Any) -> None:
    name = type(given).__name__
    said = rf"^checkpoint is an? {name}; it takes the folder of a checkpoint of torch.*StorageRead"
    with pytest.raises(UsageError, match=said):
        mend.SavedState(given)
