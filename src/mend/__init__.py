"""mend: trains one PyTorch model on several racks that are joined by a poor network.

A name is loaded when it is first used, so that `mend --help` and the witness do without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mend.types import VERSION

if TYPE_CHECKING:
    from mend.api import Runtime, get_runtime, mend_init, mend_shutdown, session
    from mend.config import MendConfig
    from mend.engine.checkpoint.checkpoint_files import newest_checkpoint
    from mend.engine.checkpoint.checkpoint_writer import PendingCheckpoint
    from mend.engine.checkpoint.saved_state import SavedState
    from mend.engine.features.data_ledger import DataLedger
    from mend.errors import MendError
    from mend.following import Version, follow
    from mend.mesh import rack_mesh
    from mend.status.status import SlowRack, Status, TokenLedger

__version__ = VERSION

__all__ = [
    "DataLedger",
    "MendConfig",
    "MendError",
    "PendingCheckpoint",
    "Runtime",
    "SavedState",
    "SlowRack",
    "Status",
    "TokenLedger",
    "Version",
    "__version__",
    "follow",
    "get_runtime",
    "mend_init",
    "mend_shutdown",
    "newest_checkpoint",
    "rack_mesh",
    "session",
]

_HOME = {
    "DataLedger": "mend.engine.features.data_ledger",
    "MendConfig": "mend.config",
    "MendError": "mend.errors",
    "PendingCheckpoint": "mend.engine.checkpoint.checkpoint_writer",
    "Runtime": "mend.api",
    "SavedState": "mend.engine.checkpoint.saved_state",
    "Status": "mend.status.status",
    "SlowRack": "mend.status.status",
    "TokenLedger": "mend.status.status",
    "Version": "mend.following",
    "follow": "mend.following",
    "get_runtime": "mend.api",
    "mend_init": "mend.api",
    "mend_shutdown": "mend.api",
    "newest_checkpoint": "mend.engine.checkpoint.checkpoint_files",
    "rack_mesh": "mend.mesh",
    "session": "mend.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
