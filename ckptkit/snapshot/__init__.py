"""The content of a save, the place of each box in a slot, and how the state is kept alive until it is copied."""
