"""Records the training of tests.process.planted in this process, as JSON would carry it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mend.determinism.comparison import Recording, recording_of
from mend.determinism.recorder import Recorder
from tests.process import planted


def recorded(fault: str, *, detail: int = 0, last: int = 0, **how: Any) -> Recording:
    lines: list[str] = []
    with Recorder(
        lambda record: lines.append(json.dumps(record)), last=last, detail=(detail, detail)
    ):
        if last:
            with pytest.raises(SystemExit):
                planted.train(fault, **how)
        else:
            planted.train(fault, **how)
    return recording_of(json.loads(line) for line in lines)
