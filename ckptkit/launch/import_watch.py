"""Watches the imports of a template, for what a worker would lose by a fork. Loaded by path, as the worker is: only the
standard library is imported here."""

import functools
import importlib.machinery
import importlib.util
import os
import random
import sys
import types
from collections.abc import Callable

_THREADS_OF = ("numpy",)  # OpenBLAS ends its threads before a fork, and starts them again after it
# The variables with another value in each worker, or in each attempt. A template does not have them.
_OWN_VARIABLES = frozenset(
    f"CKPTKIT_{name}"
    for name in ("PROCESS", "PROCESSES", "COORDINATOR", "ATTEMPT", "LOCAL_PROCESS", "LOCAL_PROCESSES", "AGENT")
)
_SEEDS = ("seed", "setstate", "set_state")


class Lost:
    """Notes what a fork would lose of a module that is imported in a template.

    Such a module looks for a worker's own variables, or seeds random numbers: each worker has others."""

    def __init__(self):
        self.what: str | None = None
        self._encode = os.environ.encodekey  # each lookup calls it, also one in vain
        os.environ.encodekey = self._note_lookup  # type: ignore[assignment]  bytes here, str in the annotations
        self._seeds: list[tuple[types.ModuleType, str, object]] = []
        self.watch_seeds(random)
        if "numpy.random" in sys.modules:
            self.watch_seeds(sys.modules["numpy.random"])

    def watch_seeds(self, module: types.ModuleType) -> None:
        """Notes calls of its functions that set the state."""
        for name in _SEEDS:
            if (seed := getattr(module, name, None)) is not None:
                self._seeds.append((module, name, seed))
                setattr(module, name, functools.partial(self._seed, module.__name__, seed))

    def end(self) -> None:
        """Notes no more."""
        os.environ.encodekey = self._encode
        for module, name, seed in self._seeds:
            setattr(module, name, seed)

    def _note_lookup(self, name: str) -> str:
        if name in _OWN_VARIABLES:
            self.what = f"it looks for {name}, which each worker has for itself"
        return self._encode(name)

    def _seed(self, module: str, seed: Callable, *args: object, **kwargs: object) -> object:
        self.what = f"it seeds {module}, and each worker has new random numbers"
        return seed(*args, **kwargs)


class ImportWatch:
    """A finder that counts the threads which modules of `_THREADS_OF` start while they are imported, and has
    `numpy.random` watched before anybody can use it."""

    def __init__(self, lost: Lost):
        self.started = 0
        self._lost = lost
        self._depth = 0
        self._sought: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders find, with a loader that looks."""
        del path, target
        counts = name.split(".")[0] in _THREADS_OF and not self._depth
        if name in self._sought or not (counts or name == "numpy.random"):
            return None
        self._sought.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._sought.remove(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            self._depth += 1
            before = len(os.listdir("/proc/self/task"))
            try:
                execute(module)
                if name == "numpy.random":
                    self._lost.watch_seeds(module)
            finally:
                self._depth -= 1
                self.started += (len(os.listdir("/proc/self/task")) - before) if counts else 0

        spec.loader.exec_module = exec_module
        return spec
