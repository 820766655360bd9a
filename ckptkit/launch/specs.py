"""The workers of one host in one attempt, with their words and their environment, and a free port for the job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PLACEHOLDERS = ("process", "processes", "coordinator", "attempt")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker to start: the words of its command, and the variables added to the host's environment."""

    process: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """The part of a host in an attempt: `here` workers of `processes`, from number `first` on."""

    first: int
    here: int
    processes: int
    coordinator: str
    attempt: int


def specs_of(
    command: Sequence[str], place: JobPlace, prefixes: Sequence[Sequence[str]] | None = None
) -> list[WorkerSpec]:
    """One for each worker of the host. `prefixes[i]` are words before the command of its i-th worker."""
    found = []
    for local in range(place.here):
        values = {
            "process": str(place.first + local),
            "processes": str(place.processes),
            "coordinator": place.coordinator,
            "attempt": str(place.attempt),
        }
        environment = {f"CKPTKIT_{name.upper()}": value for name, value in values.items()}
        environment |= {"CKPTKIT_LOCAL_PROCESS": str(local), "CKPTKIT_LOCAL_PROCESSES": str(place.here)}
        environment["CKPTKIT_AGENT"] = str(os.getpid())
        found.append(
            WorkerSpec(
                process=place.first + local,
                argv=filled_in(command, values),
                prefix=tuple(prefixes[local]) if prefixes is not None else (),
                environment=environment,
            )
        )
    return found


def has_placeholders(words: Sequence[str]) -> bool:
    """Whether the words differ from worker to worker, or from attempt to attempt."""
    return any(f"{{{name}}}" in word for word in words for name in _PLACEHOLDERS)


def filled_in(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """The words with their placeholders replaced; not `str.format`, since a command may hold other braces."""
    filled = list(words)
    for name, value in values.items():
        filled = [word.replace(f"{{{name}}}", value) for word in filled]
    return tuple(filled)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` ('': of any address) that was free a moment ago.

    Should another program take it, the attempt fails and the next one has a new port.
    """
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
