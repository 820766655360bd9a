"""Orbax's names replaced by ours in a process of its own."""
