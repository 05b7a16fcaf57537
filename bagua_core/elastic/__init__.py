"""Steps that commit: generations as a worker follows them, roll-back, heal, the ledger."""
