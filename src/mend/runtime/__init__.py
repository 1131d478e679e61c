"""runtime: where decisions and tensors meet. Owns threads, clocks, files, logs; has no opinions."""

from mend.runtime.registry import get_runtime

__all__ = ["get_runtime"]
