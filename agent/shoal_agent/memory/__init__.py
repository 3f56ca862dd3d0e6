"""The ledger of the memory budget: what may be resident, and within how much. Pure."""
