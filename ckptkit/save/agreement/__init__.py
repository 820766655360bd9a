"""How processes agree on a save: effects, votes, the log of commits, replicas, and the fence of a run."""
