"""tools.doctor: `mend doctor` checks a machine, its network and the other racks.

`examine` and `local` read this machine, `meet` measures the other racks, `estimate` computes memory
and exchange times, `findings` says what to change, `show` prints.
"""
