"""Clocks, memory pages, disk files, lazy imports: what anything may use. Knows nothing of checkpoints."""
