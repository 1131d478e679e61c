"""coordination: who, when, in which order. Pure machines: no tensor, no clock, no socket, no file."""
