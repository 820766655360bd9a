"""The first module of a process of `tests.forked`: `DIRECTORY STDOUT STDERR`, and then the words after `python`."""

from __future__ import annotations

import os
import runpy
import sys
import types


def main() -> None:
    directory, *outputs = sys.argv[1:4]
    words = sys.argv[4:]
    for fd, path in zip((1, 2), outputs, strict=True):
        if path:
            opened = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(opened, fd)
            os.close(opened)
    os.chdir(directory)
    kind = words[0]
    sys.argv = words if kind not in ("-c", "-m") else ["-c", *words[2:]] if kind == "-c" else words[1:]
    sys.path[0] = {"-c": "", "-m": directory}.get(kind, os.path.dirname(os.path.abspath(words[0])))
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        runpy._run_module_as_main(words[1], alter_argv=True)  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(words[1], "<string>", "exec"), main_module.__dict__)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
