"""Kill at every request: each command that writes is killed after each of its storage operations.

`Judge` remakes the state after an operation, and runs the same command again, then every other one.
"""
