"""What a save holds, where each box lies in a slot, and how the state is kept alive until it is copied."""
