"""Serves the metrics of one process: its own status, and its view of the job.

The loop publishes the view once a second, whether or not anybody scrapes, so that a scrape costs
the loop nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from mend.engine.io.port_holders import open_when_free
from mend.events.base import Emit
from mend.events.kinds import StatusUnanswered
from mend.status.messages import JobStatus
from mend.status.metrics import Sample, samples_of_job, samples_of_rank
from mend.status.metrics_server import MetricsServer
from mend.status.status import Status

PUBLISH_S = 1.0
"""Seconds between two views, so the maximum age of a served one."""


class MetricsAddress(NamedTuple):
    """Where to serve. `host`: empty for the loopback interface. `port`: 0 for nowhere."""

    host: str = ""
    port: int = 0


NOWHERE = MetricsAddress()


class ServedMetrics:
    """Serves nothing before `open`."""

    def __init__(self, note: Emit) -> None:
        self._note = note
        self._server: MetricsServer | None = None
        self._view: JobStatus | None = None
        self._failed = False
        self.status: Callable[[], Status] | None = None
        """Of this rank, once it trains; any thread may call it."""

    def open(self, address: MetricsAddress, labels: Mapping[str, str]) -> None:
        """Listen, as soon as a dying process has freed the port. Raises AddressInUse, and
        ConfigError as MetricsServer does."""

        def listen() -> None:
            self._server = MetricsServer(*address, labels, self.samples)

        open_when_free(listen, self._note, lambda: False)

    @property
    def opened(self) -> bool:
        return self._server is not None

    def publish(self, make: Callable[[], JobStatus]) -> None:
        """Replace the served view of the job; loop thread. Metrics must never stop training, so an
        error of `make` is only noted, once."""
        try:
            self._view = make()
        except Exception as error:
            if not self._failed:
                self._failed = True
                self._note(StatusUnanswered(repr(error)))

    def samples(self) -> Iterator[Sample]:
        if (status := self.status) is not None:
            yield from samples_of_rank(status())
        if (view := self._view) is not None:
            yield from samples_of_job(view)

    def close(self) -> None:
        """Free the port. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
