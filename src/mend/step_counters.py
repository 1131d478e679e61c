"""Where an object that counts the steps of a model meets the job that trains the model.

`determinism` announces its trainers, and `api` listens. Neither imports the other for it:
determinism works without a job, and a job does without the compiler that determinism loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class StepCounter(Protocol):
    """Counts the steps that it makes with `model`; what it does next depends on the count."""

    steps: int
    model: Any

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


_listeners: list[Callable[[StepCounter], None]] = []


def listen(listener: Callable[[StepCounter], None]) -> None:
    """Call `listener` at every announcement of this process."""
    _listeners.append(listener)


def announce(counter: StepCounter) -> None:
    """Say that `counter` is about to read `steps` for its next step. A listener may load a state
    into it; what a listener raises comes through."""
    for listener in _listeners:
        listener(counter)
