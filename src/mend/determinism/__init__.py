"""determinism: equal bits inside a rack. Switches, digests and arithmetic; opens no socket and no
file, knows no other rack, and is off until enable() is called."""

from mend.determinism.collectives import all_gather, all_reduce, ddp_hook, fix_fsdp, reduce_scatter
from mend.determinism.compiled_functions import elementwise
from mend.determinism.digests import digest, optimizer_digest, weight_digest
from mend.determinism.enabling import Determinism, enable
from mend.determinism.layout import rows, sequences
from mend.determinism.sequence_parallel import GatherTokens, SequenceParallel, SplitTokens
from mend.determinism.sharded_loss import cross_entropy
from mend.determinism.tensor_parallel import ColumnParallel, RowParallel
from mend.determinism.trainer import DeterministicTrainer, Verdict

__all__ = [
    "ColumnParallel",
    "Determinism",
    "DeterministicTrainer",
    "GatherTokens",
    "RowParallel",
    "SequenceParallel",
    "SplitTokens",
    "Verdict",
    "all_gather",
    "all_reduce",
    "cross_entropy",
    "ddp_hook",
    "digest",
    "elementwise",
    "enable",
    "fix_fsdp",
    "optimizer_digest",
    "reduce_scatter",
    "rows",
    "sequences",
    "weight_digest",
]
