"""A save from the step loop to every tier: the threads, the votes, and the ledger of steps."""
