"""Trees at a path of their own."""
