"""detector: judges whether a rack is slow. Pure: samples in, verdicts out; it never acts."""

from mend.detector.cause import (
    COMPUTE,
    INPUT,
    LINK,
    LINK_MIN,
    UNKNOWN,
    Cause,
    cause_in_words,
    cause_of,
)
from mend.detector.own_past import DetectorOptions, MeasuredPace, OwnPast, Slowdown
from mend.detector.peers import PeerComparison

__all__ = [
    "COMPUTE",
    "INPUT",
    "LINK",
    "LINK_MIN",
    "UNKNOWN",
    "Cause",
    "DetectorOptions",
    "MeasuredPace",
    "OwnPast",
    "PeerComparison",
    "Slowdown",
    "cause_in_words",
    "cause_of",
]
