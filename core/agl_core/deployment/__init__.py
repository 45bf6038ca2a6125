"""Which versions of a policy answer real use, and how that is decided: ledger, gate, canary, serving."""
