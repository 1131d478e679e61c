"""engine: where decisions and tensors meet. Owns threads, clocks, files, logs; has no opinions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mend.engine.registry import get_runtime

__all__ = ["get_runtime"]


def __getattr__(name: str) -> Any:
    """Late: what uses no model, as the witness, does without torch."""
    if name == "get_runtime":
        from mend.engine.registry import get_runtime

        return get_runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
