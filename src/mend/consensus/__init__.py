"""consensus: who may decide. The log, its records, acceptors, proposers. No time, no addresses."""
