"""coordination: who, when, in which order. Pure machines: no tensors, clocks, sockets or files."""
