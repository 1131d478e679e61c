"""consensus: who may decide. The log, its records, acceptors and proposers. Knows neither time nor
addresses."""
