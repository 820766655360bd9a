"""Finds the script or module of this Python environment that a command runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_FLAGS = re.compile(r"-[bBdEIOPqsSuvx]+")
_SHEBANG_BYTES_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCommand:
    """`interpreter` with `options` runs the script or module `target`; `named` are the words that name it, and
    the words from `arguments_at` on are its arguments."""

    interpreter: str
    options: tuple[str, ...]
    kind: Literal["script", "module"]
    target: str
    named: tuple[str, ...]
    arguments_at: int

    def to_json(self) -> dict[str, Any]:
        """For a worker."""
        return {"kind": self.kind, "target": self.target, "options": list(self.options), "named": list(self.named)}


def python_command(words: Sequence[str]) -> PythonCommand | None:
    """The script or module that `words` run. None: not Python, another environment, or an option not known here."""
    found = shutil.which(words[0])
    if found is None:
        return None
    if not re.fullmatch(r"python(\d(\.\d+)?)?", Path(found).name):
        return _entry_point(Path(found))
    if not _is_of_this_environment(Path(found)):
        return None
    options: list[str] = []
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        word = rest[0]
        if word == "-m" and len(rest) > 1:
            named, at = ("-m", rest[1]), len(words) - len(rest) + 2
            return PythonCommand(
                interpreter=found, options=tuple(options), kind="module", target=rest[1], named=named, arguments_at=at
            )
        if word in ("-X", "-W") and len(rest) > 1:
            options += rest[:2]
            rest = rest[2:]
        elif _FLAGS.fullmatch(word) or re.fullmatch(r"-[XW].+", word):
            options.append(word)
            rest = rest[1:]
        else:
            return None
    if not rest or not Path(rest[0]).is_file():
        return None
    named, at = (rest[0],), len(words) - len(rest) + 1
    return PythonCommand(
        interpreter=found, options=tuple(options), kind="script", target=rest[0], named=named, arguments_at=at
    )


def _entry_point(path: Path) -> PythonCommand | None:
    """A console script that an installer made: Python, below a line that names the interpreter."""
    with path.open("rb") as file:
        head = file.read(_SHEBANG_BYTES_MAX).split(b"\n")
    interpreter = head[0].removeprefix(b"#!").strip().decode(errors="replace")
    if interpreter == "/bin/sh" and len(head) > 1:  # where the path of the interpreter is too long for a first line
        match = re.match(r"'''exec' \"?([^\"]+?)\"? \"\$0\" \"\$@\"", head[1].decode(errors="replace"))
        interpreter = match[1] if match else ""
    if not head[0].startswith(b"#!") or " " in interpreter or not _is_of_this_environment(Path(interpreter)):
        return None
    return PythonCommand(
        interpreter=interpreter, options=(), kind="script", target=str(path), named=(str(path),), arguments_at=1
    )


def _is_of_this_environment(interpreter: Path) -> bool:
    """Whether it has this process's packages: an interpreter of the same folder, and the same program."""
    own = Path(sys.executable)
    try:
        return interpreter.parent.resolve() == own.parent.resolve() and interpreter.resolve() == own.resolve()
    except OSError:
        return False


def path_of(command: PythonCommand) -> list[str]:
    """`sys.path` as the command begins with it, where it has this process's environment and no options for it."""
    first = os.path.dirname(os.path.realpath(command.target)) if command.kind == "script" else os.getcwd()
    return [first, *sys.path]
