"""engine.compute: the arithmetic of rounds, its buffers, and the threads that it runs in."""
