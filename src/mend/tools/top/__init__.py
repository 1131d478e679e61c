"""tools.top: `mend top` shows a running job. `run` asks, `picture` joins answers, `table` draws."""
