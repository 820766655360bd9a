"""All points of some commands on one medium, or a few of each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.killed.commands import Command
from tests.killed.judge import Failure, Judge
from tests.killed.media import DiskMedium, Medium, bucket_medium
from tests.killed.running import Main
from tests.roots.catalog import SavedRuns


@final
class Campaign:
    """Records the commands on a medium, below `home`; a context manager."""

    def __init__(self, home: Path, medium: str, commands: Sequence[Command], main: Main):
        self._commands = {each.name: each for each in commands if medium in each.media}
        self._main = main
        self._open = ExitStack()
        self._judges: dict[str, Judge] = {}
        self._key = _signing_key(home / "key.pem")
        saved = SavedRuns(home / "saved")
        made = list(self._commands.values())
        self._medium: Medium
        if medium == "disk":
            self._medium = DiskMedium(home, made, saved, self._key)
        else:
            self._medium = self._open.enter_context(bucket_medium(home, made, saved, self._key, main))

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def names(self) -> list[str]:
        """Of the commands that the medium can hold."""
        return list(self._commands)

    def states(self, name: str) -> int:
        """How many different ones of a command were judged."""
        return self._judge(name).states

    def points(self, name: str) -> Sequence[str]:
        """The operations of a command; the first is nothing."""
        return self._medium.points(self._commands[name])

    def checked(
        self, name: str, *, full: bool = True, point: int | None = None, seed: int = 0
    ) -> Iterator[tuple[int, str, list[Failure]]]:
        """Each point of a command: its number, its operation, and what is wrong after it. Without `full` the one before
        the last, and a random one."""
        judge = self._judge(name)
        numbers = list(range(len(judge.points)))
        if point is not None:
            numbers = [point]
        elif not full:
            numbers = sorted({numbers[-2:][0], random.Random(seed).choice(numbers)})
        for number in numbers:
            yield number, judge.points[number], judge.check(number)

    def _judge(self, name: str) -> Judge:
        if name not in self._judges:
            self._judges[name] = Judge(self._medium, self._commands[name], self._main, self._key)
        return self._judges[name]


def _signing_key(file: Path) -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(file)
