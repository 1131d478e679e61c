"""protocol: who, when, in which order. Pure machines; never a tensor, a clock, a socket or a
file."""
