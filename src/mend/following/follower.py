"""The loop of a follower: asks what is decided, pulls it, and yields it to its caller."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from torch import Tensor, nn

from mend.engine.state.training_progress import plain_values
from mend.errors import ConfigError, GaveUp, TransportError, WireError, require
from mend.following.fill import fill
from mend.following.log_view import Decided, LogView
from mend.following.pull import Puller
from mend.status.event_log import append_values
from mend.status.follow_messages import (
    ANSWER_BYTES_MAX,
    Follow,
    Followed,
    decode_followed,
    encode_follow,
)
from mend.transport.lane_reader import LaneReader
from mend.transport.status_client import StatusClient
from mend.types import SECOND

POLL_S = 0.25
"""Time between two questions. A process answers 50 a second, of all clients together."""

SILENT_S = 3.0
"""After this long without an answer, all known processes are asked, not only the last one."""

STRANGE_S = 20.0
"""After this long without an answer of its own lineage, a follower accepts another lineage."""

STALL_S = 10.0
"""After this long without a byte from a rack, the next one is asked."""

RETRY_S = 0.5
"""Time until the newest version is requested again, if no rack has it."""


@dataclass(frozen=True, slots=True)
class Version:
    """The merged model after one commit. It is immutable, so any thread may keep and read it."""

    job: str
    number: int
    """Number of commits of weights up to this version, over all fragments."""
    versions: tuple[int, ...]
    """Per fragment of the job."""
    digest: str
    """sha256 over the versions and digests of the log: identifies these bits."""
    step: int
    """The newest step whose work is merged in it."""
    tensors: Mapping[str, Tensor] = field(repr=False)
    """By name in the model's state dict, in the model's types, on the CPU: parameters, and running
    statistics once they are averaged."""
    changed: frozenset[str] = field(repr=False)
    """Names of the tensors that differ from the version before it in this iteration."""
    bytes_received: int
    seconds: float
    missed: int
    """Number of earlier versions that this follower missed because it was away, or slower than the
    job."""

    def fill(self, module: nn.Module, lock: AbstractContextManager[object] | None = None) -> None:
        """Copy the tensors into the parameters and buffers of the same names, all or none. The
        module keeps its memory, types and devices; what the job does not exchange stays as it is.

        Everything is checked and brought to the module's device first; only the last copy is made
        under `lock`. Threads that hold it while they read the module never see half a version. If
        the copy fails, the module gets its former values back. Raises UsageError for a module that
        lacks a tensor, has it in another shape, or holds shards.
        """
        fill(module, self.tensors, lock)

    def record(self, folder: str | Path, **values: float) -> None:
        """Append numbers of this version, such as `record("runs/first", held_out_merged=loss)`, to
        the events in the job's diagnostics_dir, for `mend report`, which draws them with the curves
        of the lowest rack. Raises UsageError for a tensor, and OSError.
        """
        append_values(Path(folder), self.step, plain_values(values))


class Follower:
    """See `mend.follow`. Iterate once, and close it."""

    def __init__(
        self, addresses: Sequence[str], secrets: tuple[bytes, ...], job: str, socks_proxy: str,
        *, every: int = 1, wait_s: float = math.inf, stall_s: float = STALL_S,
    ) -> None:  # fmt: skip
        if every < 0:
            raise ConfigError("every", every, "must not be negative", "0: only the newest version.")
        if not addresses:
            raise ConfigError("addresses", addresses, "is empty", "Give tcp://host:port of a rack.")
        self._given, self._job, self._every = list(addresses), job, every
        self._secrets, self._proxy = secrets, socks_proxy
        self._wait_s, self._stall_s = wait_s, stall_s
        self._log = LogView()
        self._client = StatusClient(ANSWER_BYTES_MAX, secrets, socks_proxy)
        for address in addresses:
            self._client.watch(address)
        self._at = ""
        """The address of the process that answers; empty: all are asked."""
        self._heard_s, self._asked_s = time.monotonic(), 0.0
        self._puller: Puller | None = None
        self._tensors: dict[str, Tensor] = {}
        self.number = -1
        """Number of the newest version that was yielded; -1: none."""
        self.trouble = ""
        """Why a newer version could not be had, as text; empty: there is none yet."""
        self.say: Callable[[str], object] = lambda _: None
        """Called with a text if no process answers."""

    # -------------------------------------------------------------- the log

    def _hear(self, limit_s: float) -> list[Decided]:
        """What was decided since the last call, oldest first. Waits up to the limit for it."""
        end_s = time.monotonic() + limit_s
        while True:
            now_s = time.monotonic()
            if now_s - self._asked_s >= POLL_S:
                self._asked_s = now_s
                self._ask(now_s)
            for address, frame in self._client.collect(min(POLL_S, max(0.0, end_s - now_s))):
                if found := self._take(address, frame):
                    return found
            if self._log.over or time.monotonic() >= end_s:
                return []

    def _ask(self, now_s: float) -> None:
        question = encode_follow(Follow(self._job, self._log.lineage, self._log.index))
        if self._at and now_s - self._heard_s < SILENT_S:
            self._client.ask(self._at, question)
            return
        self._at = ""
        addresses = dict.fromkeys((*self._given, *(rack.address for rack in self._log.racks)))
        self._client.keep(addresses)
        for address in addresses:
            try:
                self._client.watch(address)
            except (ConfigError, TransportError):  # named by a rack, not by the caller
                continue
            self._client.ask(address, question)

    def _take(self, address: str, frame: bytes) -> list[Decided]:
        now_s = time.monotonic()
        try:
            answer = decode_followed(frame)
            alone = now_s - self._heard_s >= STRANGE_S
            if not self._log.accepts(answer, alone=alone):
                return []
            before, found = self._log.lineage, self._log.take(answer)
        except WireError as error:
            self.trouble, self._log.index, self._log.lineage = str(error), 0, ""
            return []
        self._follow_racks(answer, moved=address != self._at, anew=before != self._log.lineage)
        self._at, self._heard_s, self._job = address, now_s, answer.job
        return found

    def _follow_racks(self, answer: Followed, *, moved: bool, anew: bool) -> None:
        if self._puller is None:
            stall_ns = int(self._stall_s * SECOND)
            reader = LaneReader(answer.job, self._secrets, self._proxy, stall_ns)
            self._puller = Puller(reader)
        if moved or self._puller.racks != self._log.racks:
            # The rack that answers now is asked before the one that has stopped answering.
            self._puller.racks, self._puller.first = self._log.racks, answer.rack
        if anew:
            self._puller.forget()

    # -------------------------------------------------------------- the model

    def __iter__(self) -> Iterator[Version]:
        waiting: list[Decided] = []
        while waiting or not self._log.over:
            waiting += self._hear(0.0 if waiting else POLL_S)
            if self._every == 0:
                waiting = waiting[-1:]
            if not waiting:
                self._check_silence()
                continue
            try:
                version = self._pulled(waiting[0])
            except (TransportError, WireError) as error:
                self.trouble = str(error)
                if len(waiting) == 1 and not self._log.over:
                    waiting += self._hear(RETRY_S)  # the racks may not have it yet
                    self._check_silence()
                    continue
                version = None
            del waiting[0]
            if version is not None:
                self.trouble = ""
                yield version

    def _check_silence(self) -> None:
        silent_s = time.monotonic() - self._heard_s
        if silent_s >= SILENT_S and not self.trouble:
            self.trouble = "no process of a running job answers"
            self.say(f"{', '.join(self._given)}: {self.trouble}; asking on")
        if silent_s >= self._wait_s:
            raise GaveUp(
                f"{', '.join(self._given)}: no process of a running job has answered for "
                f"{silent_s:.0f} s. Look at the job with `mend top`; check the addresses, the key "
                "and the job id"
            )

    def _pulled(self, decided: Decided) -> Version | None:
        """Pull a version. None: it is not one that the caller wants (`every`)."""
        puller, begun_s = require(self._puller, "nothing is decided yet"), time.monotonic()
        puzzle = puller.puzzle()
        number = puzzle.number(decided.versions)
        of, last = max(1, self._every), self.number
        if number == last or (number % of and last >= 0):
            return None
        before, made = puller.bytes_received, dict[str, Tensor]()
        for fragment, vectors in puller.pull(decided).items():
            made |= puzzle.tensors(fragment, vectors)
        self._tensors, self.number = {**self._tensors, **made}, number
        return Version(
            job=self._job,
            number=number,
            versions=decided.versions,
            digest=decided.digest,
            step=decided.step,
            tensors=MappingProxyType(self._tensors),
            changed=frozenset(made),
            bytes_received=puller.bytes_received - before,
            seconds=time.monotonic() - begun_s,
            missed=max(0, number // of - last // of - 1) if self._every and last >= 0 else 0,
        )

    @property
    def decided(self) -> int:
        """Number of the newest decided version; -1: unknown."""
        if self._log.now is None or self._puller is None or self.number < 0:
            return -1
        return self._puller.puzzle().number(self._log.now.versions)

    @property
    def lost(self) -> int:
        """Number of the newest decided version that the caller wants and has not got; 0: none."""
        of = max(1, self._every)
        newest = self.decided // of
        return newest * of if newest > self.number // of else 0

    def close(self) -> None:
        """Idempotent."""
        self._client.close()
        if self._puller is not None:
            self._puller.close()
