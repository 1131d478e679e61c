"""transport: bytes to peers and back. Owns sockets and their threads; no message, no policy."""
