"""The names of tsugi-mend, for scripts that were written for it: only their imports change.

`MendConfig` takes its 51 settings, `runtime` has the calls of its loop. mend exchanges by itself,
so most of these calls have nothing to do; new scripts use `mend` alone.
"""

from mend.compat.config import MendConfig
from mend.compat.runtime import mend_init, mend_shutdown

__all__ = ["MendConfig", "mend_init", "mend_shutdown"]
