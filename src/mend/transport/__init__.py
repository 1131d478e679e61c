"""transport: moves bytes between processes. Owns sockets and their threads; knows no messages and
decides nothing."""
