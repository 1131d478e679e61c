"""tools.top: `mend top` shows a running job. `run` asks, `picture` joins the answers, `table` draws."""
