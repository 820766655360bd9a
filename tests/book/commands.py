"""Commands of `ckptkit`, each in a forked process: the one that forks the jobs must not use JAX itself."""

from __future__ import annotations

import os
import tempfile
import warnings

_SAID_CHARS = 600


def run_command(*words: str) -> tuple[int, str]:
    """The exit code of a command, and the end of what it printed."""
    with tempfile.TemporaryFile("w+") as said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has no other thread yet that a child would need
            pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                from ckptkit.cli import main

                code = main(list(words))
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        return code, said.read()[-_SAID_CHARS:]
