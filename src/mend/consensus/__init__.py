"""consensus: who may decide. The log, its records, votes, and the right to append. No time, no addresses."""
