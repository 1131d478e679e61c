"""Serves the metrics of one process: its own status, and its view of the job.

The loop publishes the view once a second, whether or not anybody scrapes, so that a scrape costs
the loop nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from mend.engine.io.io_loop import IoLoop
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

    def publish(self, view: Callable[[bool], JobStatus], loop: IoLoop) -> None:
        """Serve `view(False)`, the job as this process knows it, from now on. `view` is called on
        the loop every PUBLISH_S. Does nothing unless `open` was called."""
        if self._server is not None:
            loop.call(partial(self._publish, view))
            loop.every(PUBLISH_S, partial(self._publish, view))

    def _publish(self, view: Callable[[bool], JobStatus]) -> None:
        """Replace the served view. Metrics must never stop training, so an error of `view` is only
        noted, once."""
        try:
            self._view = view(False)
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
