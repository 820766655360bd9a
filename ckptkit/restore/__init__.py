"""How a restore finds, plans, reads, verifies and places the bytes of a save."""
