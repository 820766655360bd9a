"""A restart in each state that a crash of the job of two processes (`crash_pair`) leaves, and its violations.

The restart is one process. It has only the files of the state, and is judged by what process 0 had noted as committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, final
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import ckptkit
from bench.crash_pair import make_values, open_manager, save_args
from ckptkit.durable.lifecycle import step_records
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.sidecars import split_sidecars
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest

CONTINUED_EVERY = 20  # distinct states that have a step: the run goes on from them, and stock Orbax reads them
_CONTINUED = 9


@final
class Restarts:
    """Asks a restart about each distinct state of a root, once."""

    def __init__(self, root: str):
        self._root = root
        self._known: dict[tuple[str, int], list[str]] = {}
        self._right = set[str]()  # digests of steps that were restored
        self._with_steps = 0
        self.count = 0

    def check(
        self, digest: str, promised: set[int], put_back: Callable[[], None], digest_of_step: Callable[[int], str]
    ) -> list[str]:
        """The violations of a state: each listed step has to be whole, and each promised step listed.

        `put_back` makes the root be in this state, unless one with its `digest` and as many promises is known.
        """
        key = digest, len(promised)
        if key not in self._known:
            put_back()
            self.count += 1
            try:
                self._known[key] = list(self._ask(promised, digest_of_step))
            except Exception as error:  # noqa: BLE001  whatever a restart dies of is a violation, and is printed
                self._known[key] = [f"{type(error).__name__}: {error}"]
        return self._known[key]

    def _ask(self, promised: set[int], digest_of_step: Callable[[int], str]) -> Iterator[str]:
        proofs = _listed(self._root)
        yield from (f"step {step} is {each.state}: {each}" for step, each in proofs.items() if each.state != "proven")
        if lost := promised - proofs.keys():
            yield f"promised and not there: {sorted(lost)}"
        with open_manager(self._root) as manager:
            if sorted(manager.all_steps()) != sorted(proofs):
                yield f"the manager lists {sorted(manager.all_steps())}, verify {sorted(proofs)}"
            for step in sorted(proofs):
                yield from self._restored(manager, step, digest_of_step(step))
            self._with_steps += bool(proofs)
            if proofs and self._with_steps % CONTINUED_EVERY == 1:
                yield from _by_orbax(self._root, proofs)
                manager.save(_CONTINUED, args=save_args(jax.tree.map(jnp.asarray, make_values(_CONTINUED))))
                manager.wait_until_finished()
                yield from _differences(manager.restore(None, args=_restore_args()), _CONTINUED)

    def _restored(self, manager: ckptkit.CheckpointManager, step: int, digest: str) -> Iterator[str]:
        """A step that was restored in another state, with the same files, is not restored again."""
        if digest not in self._right:
            wrong = list(_differences(manager.restore(step, args=_restore_args()), step))
            yield from wrong
            self._right.update(() if wrong else (digest,))


def any_record_believed() -> AbstractContextManager[Any]:
    """Readers take the joined record of whatever save for that of the step."""

    def believed(item: Place, _: Manifest, read: Callable[[str], bytes]) -> dict[int, Manifest]:
        texts = split_sidecars(read(paths.JOINED_SIDECARS))
        return {process: Manifest.from_bytes(text, path=item.name) for process, text in enumerate(texts)}

    return mock.patch.object(step_records, "_joined", believed)


def _listed(root: str) -> dict[int, Any]:
    """The verdict on each step that is listed; `verify` raises where there is nothing at all."""
    with suppress(ckptkit.StepNotFoundError):
        return {each.step: each for each in ckptkit.verify(root).steps if each.state != "incomplete"}
    return {}


def _by_orbax(root: str, steps: Iterable[int]) -> Iterator[str]:
    args = _restore_args(restore_args=ocp.checkpoint_utils.construct_restore_args(_target()))
    with ocp.CheckpointManager(root) as stock:
        for step in sorted(steps):
            found = stock.restore(step, args=args)
            yield from (f"by stock Orbax: {each}" for each in _differences(found, step))


def _restore_args(**more: Any) -> Any:
    return ocp.args.PyTreeRestore(_target(), **more)  # pyright: ignore[reportCallIssue]


def _target() -> dict[str, jax.ShapeDtypeStruct]:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    values = make_values(0).items()
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=here) for name, value in values}


def _differences(found: Any, step: int) -> Iterator[str]:
    for name, value in make_values(step).items():
        if np.asarray(found[name]).tobytes() != value.tobytes():
            yield f"step {step}: {name} was restored with other bits"
