"""tools.doctor: `mend doctor`, what a machine, a network and the other racks look like to mend.

`examine` and `local` look at this machine, `meet` at the others, `estimate` and `rates` at whether
it is fast enough; `findings` says what to change, `show` prints.
"""
