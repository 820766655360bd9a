"""Provenance: which versions, flags, devices and command made a save. It goes into every manifest and sidecar."""

from __future__ import annotations

import os
import shlex
import sys
from importlib import import_module

import jax
import orbax.checkpoint as ocp
from jaxlib import version as jaxlib_version

from ckptkit.model.tiers import TIERS_ENTRY

REVISION = "CKPTKIT_REVISION"  # in the environment: the revision of the source, where the caller does not give one
_CHARS_MAX = 4096  # of one value


def provenance_here(revision: str | None = None, *, with_command: bool = True, places: str = "") -> dict[str, str]:
    """The provenance of what this process saves; entries that are unknown are left out.

    `places` are its fast tiers (`places_text`), by which commands find them on this host.

    `revision` is that of the caller's source, by default the environment variable `CKPTKIT_REVISION`. The environment
    is read here, not in a command: a job is started with its flags there. Cost: microseconds, once for each manager.
    """
    devices = jax.local_devices()
    found = {
        "ckptkit": import_module("ckptkit").__version__,  # by name: its list of names is of all layers
        "jax": jax.__version__,
        "jaxlib": jaxlib_version.__version__,  # the compiler: it may be of another version than jax
        "orbax": ocp.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "devices": f"{jax.device_count()} x {devices[0].device_kind}" if devices else "",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "revision": os.environ.get(REVISION, "") if revision is None else revision,
        "command": shlex.join(sys.orig_argv) if with_command else "",
        TIERS_ENTRY: places,
    }
    return {name: value[:_CHARS_MAX] for name, value in found.items() if value}
