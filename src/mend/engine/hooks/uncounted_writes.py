"""Detects weights that changed although no step was counted. Training thread, except `look`.

mend would overwrite the training of a step that it does not see. There are three signs, from the
cheapest to the surest: versions of a few parameters (torch counts in-place writes, except those of
fused optimizers and through `.data`), values that changed while no step was counted at all, and a
state dict that was loaded after mend_init.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import xxhash
from torch import nn
from torch.utils.hooks import RemovableHandle

from mend.engine.state.fragment_state import FragmentState
from mend.errors import UsageError
from mend.events.base import Emit
from mend.events.kinds import StepsUncounted
from mend.fragment.shards import bytes_held

CANARIES_MAX = 8
"""Parameters whose versions are read at every step."""

SIGNS_MAX = 3
"""Consecutive calls of `look` that find new writes and no new step, before it warns."""


class UncountedWrites:
    """Tracks changes of the exchanged parameters. Does not keep the model alive."""

    def __init__(self, model: nn.Module, exchanged: Sequence[nn.Parameter], warn: Emit) -> None:
        """`exchanged`: all parameters that mend exchanges. `warn` notes an event."""
        self._warn = warn
        self._parameters = [weakref.ref(p) for p in exchanged]
        stride = max(1, len(exchanged) // CANARIES_MAX)
        self._canaries = self._parameters[::stride][:CANARIES_MAX]
        self._marked = self._versions()
        self._per_step = 0
        """Writes to the canaries between the last two counted steps."""
        self._steps = 0
        self.resumed = False
        """Whether the weights came from a checkpoint, and so hold more than the anchor."""
        self._seen: tuple[int, int] = (0, self._marked)
        self._signs = 0
        self._unwatched = False
        """Whether `look` ignores writes, as they are mend's own or will be undone."""
        self._before_load: list[str] | None = None
        self._load_began = 0
        """Writes to the canaries before the load."""
        self._loaded = False
        self._handles = _watch_loads(model, self)

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        self._unwatched = True
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -------------------------------------------------------------- versions

    def _versions(self) -> int:
        """Writes to the canaries so far, summed."""
        count = 0
        for each in self._canaries:  # at every step: a generator takes three times as long
            if (p := each()) is not None:
                count += p._version
        return count

    def stepped(self) -> None:
        """A step was counted, and mend has written its own changes after it."""
        now = self._versions()
        self._per_step, self._marked = now - self._marked, now
        self._steps += 1

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, mend itself writes to the parameters, right after a counted step."""
        try:
            with self._not_watched():
                yield
        finally:
            self._marked = self._versions()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Writes inside are mend's own or undone at the end, and no part of a step."""
        before = self._versions()
        try:
            with self._not_watched():
                yield
        finally:
            self._marked += self._versions() - before

    @contextlib.contextmanager
    def _not_watched(self) -> Iterator[None]:
        outside, self._unwatched = self._unwatched, True
        try:
            yield
        finally:
            self._seen = (self._steps, self._versions())
            self._unwatched = outside

    def look(self) -> None:
        """Warn once when weights change and no step is counted. Any thread calls it regularly."""
        now = (self._steps, self._versions())
        if self._unwatched:
            return
        if now[0] != self._seen[0]:
            self._signs = 0
        elif now[1] != self._seen[1]:
            self._signs += 1
            if self._signs == SIGNS_MAX:
                self._warn(StepsUncounted(self._steps))
        self._seen = now

    # -------------------------------------------------------------- the end

    def uncounted(self, fragment_states: Sequence[FragmentState]) -> str:
        """Why these weights hold training that was not counted; empty: they do not.

        Fewer writes after the last step than a step makes (clamped weights, an average swapped in)
        are not taken for training.
        """
        if self._load_in_place():
            return (
                f"a state dict was loaded after step {self._steps}, and the model keeps it. To end "
                "with the merged weights, load it after mend_shutdown, or not at all (leave out "
                "load_best_model_at_end)"
            )
        if self._steps == 0 and not self.resumed:
            moved = (
                state.view.first_unequal(state.owned, state.anchor.values)
                for state in fragment_states
            )
            name = next(filter(None, moved), "")
            return f"{name} changed and no step was counted" if name else ""
        since = self._versions() - self._marked
        if since >= max(1, self._per_step):
            return f"weights were written {since} times after step {self._steps}, the last counted"
        return ""

    # -------------------------------------------------------------- state dicts

    def check_load(self) -> None:
        """Call it before a step. Raises UsageError when a loaded state dict is still in place."""
        if self._load_in_place():
            raise UsageError(
                f"a state dict was loaded into the model after mend_init (after step {self._steps})"
                "; mend would merge the jump as if it were training. Load it before mend_init, on "
                "every rack; in the middle of a run call mend_shutdown, load, and mend_init again "
                "(under mend launch: with --no-witness, as the witness ends with the first job)"
            )

    def _load_in_place(self) -> bool:
        """Whether a load has changed the parameters, compared with before it. A load that was
        undone, such as an average swapped in for an evaluation, is forgotten."""
        if not self._loaded:
            return False
        if self._before_load != self._hashes():
            return True
        self._marked += self._versions() - self._load_began
        self._loaded, self._before_load = False, None
        return False

    def begin_load(self) -> None:
        """Call it before a state dict is loaded into a module of the model."""
        if self._before_load is None:
            self._before_load, self._load_began = self._hashes(), self._versions()

    def end_load(self) -> None:
        """Call it after a state dict was loaded."""
        self._loaded = True

    def _hashes(self) -> list[str]:
        """Hashes of this rank's part of every exchanged parameter."""
        parameters = (reference() for reference in self._parameters)
        return [xxhash.xxh3_128_hexdigest(bytes_held(p)) for p in parameters if p is not None]


class _LoadHook:
    """A hook of a module's `load_state_dict`. In a copied or unpickled model it becomes
    `ignore`."""

    def __init__(self, writes: UncountedWrites, call: Callable[[UncountedWrites], None]) -> None:
        self._writes, self._call = weakref.ref(writes), call

    def __call__(self, *_: object) -> None:
        if (writes := self._writes()) is not None:
            self._call(writes)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return hook_of_a_copy, ()


def hook_of_a_copy() -> Callable[..., None]:
    """What takes the place of mend's hooks in a copy of the model; their `__reduce__` names it."""
    return ignore


def ignore(*_: object) -> None:
    """The hook of a model that mend does not train."""


def _watch_loads(model: nn.Module, writes: UncountedWrites) -> list[RemovableHandle]:
    handles = []
    for module in model.modules():
        before = _LoadHook(writes, UncountedWrites.begin_load)
        handles.append(module.register_load_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
        after = _LoadHook(writes, UncountedWrites.end_load)
        handles.append(module.register_load_state_dict_post_hook(after))  # type: ignore[no-untyped-call]
    return handles
