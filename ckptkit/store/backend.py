"""The properties of one storage service. `backends` has one row for each scheme of URLs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptkit.store.base import Properties

Needed = Literal["get", "list", "create", "delete"]
Ask = Callable[..., Any]  # the name of a method of fsspec's file system, and its arguments

BUCKET = Properties(file_system=False, round_trips=True, atomic_rename=False, generations=False, known_to_orbax=False)
# Of any other, gcsfs takes a part for a generation or leaves out the blank that it begins with, `rm` takes a pattern.
PLAIN_PATH = re.compile(r"/?[\w.-]+/(?! )[\w./=+,~ -]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The meaning of a service's errors, and the advice for a person whose request it refused."""

    permissions: Mapping[Needed, str]  # the service's name of what each operation needs
    grant: str  # all of them, in a sentence
    sign_in: str  # how a person signs in
    caller: Callable[[Any], str | None]  # of fsspec's file system: the caller, without a request; None: unknown
    named: re.Pattern[str]  # how its messages name a permission
    signed_out: frozenset[str] = frozenset()  # errors of its client where it finds no credentials
    unanswered: frozenset[str] = frozenset()  # "library Class": errors of its client for an answer that did not come
    extra: str | None = None  # of this package, which installs the service's client; None: it comes with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One service: its behaviour, and the settings that TensorStore and fsspec need for it."""

    properties: Properties
    access: Access
    driver: str | None = None  # TensorStore's key-value store; None: TensorStore gets the URL, and decides
    service: Callable[[], Mapping[str, str]] = field(default=dict)  # more of its specification: an endpoint, a region
    create_copies: Mapping[str, str] = field(default_factory=dict)  # of `cp_file`: it fails where its target exists
    # Copies from path to path in one request, if the target has that generation (0: there is none; None: any).
    copy: Callable[[Ask, str, str, int | None], None] | None = None
    # Deletes paths, where fsspec's own `rm` cannot be relied on. Raises OSError for those that are left.
    delete_many: Callable[[Any, Ask, Sequence[str]], None] | None = None
    # Deletes these generations of paths. The limit of time is for each request.
    delete_generations: Callable[[Ask, Mapping[str, int], float], None] | None = None
