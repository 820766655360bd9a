"""The `ckptkit` command: a thin layer over the library's functions. Exit codes and shapes are in docs/CLI.md."""

from ckptkit.cli.command import main as main
