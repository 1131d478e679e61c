"""Serves metrics to Prometheus over HTTP, in separate threads.

A scrape reads what other threads have published. It runs on neither the training thread nor the
loop thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping

from mend.errors import AddressInUse, ConfigError
from mend.status.metrics import METRICS, PREFIX, Sample

LOOPBACK = "127.0.0.1"
PACKAGE = "prometheus-client"


class MetricsServer:
    """Listens from its construction to `close`.

    `host`: empty: the loopback interface. `labels`: added to every sample that has no label of the
    same name. `look`: returns the current samples, with distinct names and labels; any thread may
    call it.

    Raises AddressInUse if the port is taken, ConfigError if this process cannot listen at the
    address or the package is missing.
    """

    def __init__(
        self, host: str, port: int, labels: Mapping[str, str], look: Callable[[], Iterator[Sample]]
    ) -> None:
        self._labels, self._look = dict(labels), look
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise without_package(port) from None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host or LOOPBACK, registry)
        except OSError as error:
            raise _refusal(host or LOOPBACK, port, error) from error

    def collect(self) -> Iterator[object]:
        """The metric families of one scrape; Prometheus calls it."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        by_name: dict[str, list[Sample]] = {}
        for sample in self._look():
            by_name.setdefault(sample.name, []).append(sample)
        for name, samples in by_name.items():
            metric = METRICS[name]
            common = {key: text for key, text in self._labels.items() if key not in metric.labels}
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(f"{PREFIX}_{name}", metric.meaning, labels=[*common, *metric.labels])
            for sample in samples:
                family.add_metric([*common.values(), *sample.labels], float(sample.value))
            yield family

    def close(self) -> None:
        """Free the port. Takes up to half a second. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def without_package(port: int) -> ConfigError:
    """The error if the package is not installed."""
    rule = f"needs the package {PACKAGE}, which is not installed"
    return ConfigError("metrics_port", port, rule, f"Run `pip install {PACKAGE}`, or set 0.")


def _refusal(host: str, port: int, error: OSError) -> AddressInUse | ConfigError:
    if error.errno == errno.EADDRINUSE:
        text = (
            f"metrics_port={port}: another process listens at {host}:{port}. Set another "
            "metrics_port (MEND_METRICS_PORT), or 0"
        )
        return AddressInUse(text, (port,))
    if error.errno == errno.EACCES:
        rule, remedy = f"this user may not listen at it ({error.strerror})", "Use 1024 or more."
        return ConfigError("metrics_port", port, rule, remedy)
    rule = f"is not an address of this machine ({error.strerror or error})"
    return ConfigError("metrics_host", host, rule, "Use 0.0.0.0 for all of them, or leave it out.")
