"""protocol: one rack in the eyes of the coordinator. Soft: it comes again with the next report."""

from __future__ import annotations

from dataclasses import dataclass

from mend.protocol.messages import Hello, Orders, Report


@dataclass
class View:
    """What the coordinator knows of one rack, from its newest messages."""

    hello: Hello
    heard_ns: int
    report: Report | None = None
    got: frozenset[tuple[int, int, int]] = frozenset()
    gone: bool = False
    sent: Orders | None = None
    sent_ns: int = 0
    serial: int = 0

    def live(self, now_ns: int, detect_ns: int) -> bool:
        fresh = self.report is None or self.report.fresh
        return fresh and not self.gone and now_ns - self.heard_ns < detect_ns
