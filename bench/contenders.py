"""The contenders: ckptkit, stock Orbax in four ways, and those of torch that are installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from bench.contenders_ours import CkptKit, CkptKitDurable
from bench.contenders_theirs import OrbaxManager, OrbaxV1, TorchCheckpointing, TorchDcp


class Contender(Protocol):
    """One way to save and to restore. One save at a time; steps grow."""

    @property
    def name(self) -> str:
        """As the JSON calls it."""
        ...

    def save(self, step: int, state: Any) -> None:
        """Returns once the caller may donate `state`."""
        ...

    def committed_s(self) -> float:
        """Waits for the last save to be committed, and returns when it was (`bench.measure.now_s`)."""
        ...

    def settled(self) -> None:
        """Waits until nothing of the last save runs any more."""
        ...

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a committed step, ready on its devices."""
        ...

    def forget(self, step: int) -> None:
        """Deletes a step, so that the ramdisk does not fill; never timed."""
        ...

    def close(self) -> None:
        """Ends everything and deletes what is left."""
        ...


def make_durable_contenders(
    names: tuple[str, ...], root: str, ramdisk: Path, environ: Mapping[str, str]
) -> list[Contender]:
    """Those of `names` that have a durable tier, each below `root`, a directory or a `gs://` prefix.

    `environ` is where the clients of a bucket find it.
    """
    os.environ.update(environ)  # this process measures one case and then ends
    makers: Mapping[str, Any] = {
        "ckptkit": lambda at: CkptKitDurable("ckptkit", at, ramdisk / "ckptkit"),
        "orbax_async": lambda at: OrbaxManager("orbax_async", at, background=True, compressed=True),
        "orbax_tuned": lambda at: OrbaxManager("orbax_tuned", at, background=True, compressed=False),
    }
    return [makers[name](f"{root}/{name}") for name in names if name in makers]


def make_contenders(names: tuple[str, ...], ramdisk: Path) -> list[Contender]:
    """Those of `names` that save (`limit` does not), each with a directory of its own below `ramdisk`."""
    makers: Mapping[str, Any] = {
        "ckptkit": lambda root: CkptKit(root),
        "orbax_async": lambda root: OrbaxManager("orbax_async", root, background=True, compressed=True),
        "orbax_tuned": lambda root: OrbaxManager("orbax_tuned", root, background=True, compressed=False),
        "orbax_v1": OrbaxV1,
        "orbax_sync": lambda root: OrbaxManager("orbax_sync", root, background=False, compressed=True),
        "torch_dcp": TorchDcp,
        "torch_checkpointing": TorchCheckpointing,
    }
    return [makers[name](ramdisk / name) for name in names if name in makers]
