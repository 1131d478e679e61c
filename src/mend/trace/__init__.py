"""trace: the tape of a process: its format, writer and reader, and the replay of its machines."""
