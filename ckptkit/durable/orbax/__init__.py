"""Orbax's managers, handlers and files: the only package of the core that uses its private names."""
