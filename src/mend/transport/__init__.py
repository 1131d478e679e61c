"""transport: bytes to peers and back. Owns sockets and their threads; no message, no policy."""

from mend.transport.base import Lane, Sideband

__all__ = ["Lane", "Sideband"]
