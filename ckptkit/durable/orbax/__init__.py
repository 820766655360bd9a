"""Orbax's managers, handlers and files: the only package that uses its private names."""
