"""Local tools."""
