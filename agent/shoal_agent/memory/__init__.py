"""The ledger of the memory budget: what may be resident. Pure."""
