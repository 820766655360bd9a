"""When a save is due: policies, intervals from costs and failure rates, preemption."""
