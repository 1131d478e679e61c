"""mend: trains one PyTorch model on several racks that are joined by a poor network."""

from mend.api import Runtime, get_runtime, mend_init, mend_shutdown, session
from mend.config import MendConfig
from mend.errors import MendError
from mend.mesh import rack_mesh
from mend.runtime.status import Status, TokenLedger
from mend.terms import VERSION

__version__ = VERSION

__all__ = [
    "MendConfig",
    "MendError",
    "Runtime",
    "Status",
    "TokenLedger",
    "__version__",
    "get_runtime",
    "mend_init",
    "mend_shutdown",
    "rack_mesh",
    "session",
]
