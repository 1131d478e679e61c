"""engine.io: the host interface, the loop's thread with its sockets, the collectives of a rack."""
