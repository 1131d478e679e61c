"""`mend bench delay-sweep`: what a slow link costs, and how much of that overlap hides.

`plan` says which cells, `run` runs them, `state` keeps what is done, `read` takes figures from a
cell's events, `rows` compares, `cost_model` predicts, `table` and `plots` show.
"""
