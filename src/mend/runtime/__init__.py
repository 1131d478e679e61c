"""runtime: where decisions and tensors meet. Owns threads, clocks, files and logging; has no
opinions."""

from mend.runtime.registry import get_runtime

__all__ = ["get_runtime"]
