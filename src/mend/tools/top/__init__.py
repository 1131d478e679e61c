"""tools.top: `mend top`, a running job live. `picture` joins answers, `table` draws, `run` asks."""
