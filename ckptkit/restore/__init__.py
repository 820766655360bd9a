"""How a restore finds, plans, reads, proves and places the bytes of a save."""
