"""determinism: equal bits inside a rack. Switches, digests and arithmetic; opens no socket and no
file, knows no other rack, and is off until enable() is called."""

from mend.determinism.digests import digest, optimizer_digest, weight_digest
from mend.determinism.enabling import Determinism, enable
from mend.determinism.trainer import DeterministicTrainer, Verdict

__all__ = [
    "Determinism",
    "DeterministicTrainer",
    "Verdict",
    "digest",
    "enable",
    "optimizer_digest",
    "weight_digest",
]
