"""Compiled programs that a restart loads, instead of tracing and lowering them again."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import stat
import sys
import threading
from contextlib import nullcontext, suppress
from logging import getLogger
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, final

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from ckptkit.errors import ProgramChangedError
from ckptkit.util import unproven
from ckptkit.util.disk_file import refuse_other_owner
from ckptkit.util.whole_file import write_whole

_MAGIC = b"ckptkit program 1\n"
_REFUTED = b"ckptkit program 1, refuted\n"
_HASH_BYTES = 32
_KEY_BYTES = 16
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")
_MODE = 0o600  # what is loaded runs: no other user may write it
_ENTRIES_MAX = 64  # files of one directory; the oldest go first
_logger = getLogger("ckptkit")
_jax_cache_is_off = threading.Lock()


@final
class CompiledProgram:
    """A compiled function. `origin`: `loaded` from the cache, or `compiled` now."""

    def __init__(self, program: jax.stages.Compiled, origin: Literal["loaded", "compiled"], proof: _Proof | None):
        self._program, self._proof = program, proof
        self.origin = origin

    def __call__(self, *args: Any) -> Any:
        """Runs the program on arguments of the shapes, dtypes and shardings that it was compiled for.

        The proof of a loaded program begins in the background when the result of the first call is there. Raises
        `ProgramChangedError` once that has refuted it.
        """
        result = self._program(*args)
        if self._proof is not None:
            self._proof.advance(result)
            if self._proof.is_proven:
                self._proof = None
        return result

    def wait_until_proven(self) -> None:
        """Returns when a fresh trace has given the same program. Raises `ProgramChangedError` if it gave another."""
        if self._proof is not None:
            self._proof.wait()


def compiled(fn: Any, *args: Any, cache: str | os.PathLike[str] | None, key: Any = None) -> CompiledProgram:
    """The program of the jitted function `fn` for `args`: loaded from `cache` if it is there, else compiled and kept.

    `args` may be abstract (`jax.ShapeDtypeStruct` with shardings). JAX's own compilation cache spares a restart the
    compiler, and not the tracing and lowering in Python; a program that is loaded here needs neither before its first
    step. They are done in a thread after that step, and their result is compared with what the file was made from.
    Until then no `CheckpointManager` of this process saves: a program that changed never reaches a checkpoint. If it
    did change, the next call, or the next save, raises `ProgramChangedError`; the job starts again, and compiles.

    A program is found by its arguments with their shardings, the source of its module, and that of the edited modules
    that this one names. The versions of installed packages, devices, flags, JAX's settings and this process's number
    count too. `key` is any JSON value, for what the function takes from elsewhere (a configuration in a closure).
    If only the sources changed, the function is traced and lowered, and a kept program of the same result is loaded.

    `cache` is a local directory; None compiles without one. Its files hold pickles, so it has to belong to this user,
    and no other user may write there; otherwise it is not used, with a warning. A program that cannot be serialised is
    not kept, with a warning. The newest 64 programs are kept.

    Cost of a load: the sources are read and hashed (about 10 ms for 100 files), the executable is deserialised. A
    program that is not there yet may come from JAX's own compilation cache, except on CPU: there it is compiled.
    """
    path = None if cache is None else _entry(cache, fn, args, key)
    if path is None:
        return CompiledProgram(fn.lower(*args).compile(), "compiled", None)
    found = _load(path)
    if found is not None:
        program, digest = found
        _logger.info("%s is loaded from %s, and compared with a fresh trace after its first call", _name(fn), path)
        return CompiledProgram(program, "loaded", _Proof(fn, args, digest, path))
    lowered = fn.lower(*args)
    digest = _digest_of(lowered)
    if not _is_refuted(path):
        program = _load_same(path, digest)
        if program is not None:
            return CompiledProgram(program, "loaded", None)
    program = _compile(lowered, args)
    if not _is_refuted(path):
        _keep(path, program, digest)
    return CompiledProgram(program, "compiled", None)


def _compile(lowered: jax.stages.Lowered, args: tuple[Any, ...]) -> jax.stages.Compiled:
    """The program, in a form that can be serialised.

    XLA's CPU backend serialises a program that was itself loaded without a part of its functions (jaxlib 0.10.2): it
    would be kept, loaded, and fail in its first step. So there JAX's cache is off meanwhile, for all threads.
    """
    placed = [leaf.sharding.device_set for leaf in jax.tree.leaves(args) if getattr(leaf, "sharding", None) is not None]
    platforms = {device.platform for devices in placed for device in devices} or {jax.default_backend()}
    if platforms != {"cpu"}:
        return lowered.compile()
    with _jax_cache_is_off:
        before = jax.config.values["jax_enable_compilation_cache"]
        try:
            _set_jax_cache(False)
            # The option has its default value: with one, JAX gives no program that this process has loaded before.
            return lowered.compile(compiler_options={"xla_embed_ir_in_executable": False})
        finally:
            _set_jax_cache(before)


def _set_jax_cache(is_enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    compilation_cache.reset_cache()  # JAX reads the setting once


@final
class _Proof:
    """The comparison of a loaded program with what its function gives today."""

    def __init__(self, fn: Any, args: tuple[Any, ...], digest: bytes, path: Path):
        self._fn, self._args, self._digest, self._path = fn, args, digest, path
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._mesh = jax.sharding.get_mesh()  # of this thread
        self.is_proven = False
        unproven.add(id(self), self.wait)

    def advance(self, result: Any = None) -> None:
        """Begins the comparison, if it has not begun, once `result` is there. Raises what it found."""
        with self._lock:
            if self._thread is None:
                leaves = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
                first = min(leaves, key=lambda leaf: leaf.size, default=None)  # likely a loss, which no caller donates
                # Not a daemon: a process that ends waits for it, since a trace at the end of the interpreter may crash.
                self._thread = threading.Thread(target=self._compare, args=(first,), name="ckptkit-prove-program")
                self._thread.start()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Returns when the program is verified; raises the error that the comparison found."""
        self.advance()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _compare(self, first: jax.Array | None) -> None:
        try:
            jax.block_until_ready(first)  # at the same time the trace doubles the processor time of the first step
        except RuntimeError as error:
            if first is None or not first.is_deleted():  # else donated: the second step has begun
                self._path.unlink(missing_ok=True)  # it may be the program that fails, at each start
                self._error = error
                return
        try:
            with nullcontext() if self._mesh.empty else jax.set_mesh(self._mesh):
                same = _digest_of(self._fn.lower(*self._args)) == self._digest
        except Exception as error:  # noqa: BLE001  raised by the caller's next call, or next save
            self._error = error
            return
        if same:
            self.is_proven = True
            unproven.remove(id(self))
            return
        with suppress(OSError):  # a program whose key does not distinguish its versions is not kept again
            write_whole(self._path, _REFUTED, mode=_MODE)
        self._error = ProgramChangedError(
            f"{self._path} was made from another program than {_name(self._fn)} gives now, and some steps ran with it; "
            "none of them was saved. Start again: it is compiled. To have such changes found before a step, put what "
            "the function depends on into `key` of ckptkit.resume.compiled.",
            path=str(self._path),
        )


def _entry(cache: str | os.PathLike[str], fn: Any, args: tuple[Any, ...], key: Any) -> Path | None:
    """Where the program is kept; None, with a warning, where a directory cannot be trusted."""
    home = Path(cache)
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        _refuse_others(os.stat(home), home)
    except OSError as error:
        _logger.warning("%s cannot keep compiled programs: %s", home, error)
        return None
    return home / f"{_name(fn)}-{_key(fn, args, key)}"


def _refuse_others(status: os.stat_result, path: Path) -> None:
    """Raises `PermissionError` where anybody else than this user could change what `path` holds."""
    refuse_other_owner(status, path)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {path}: chmod go-w {path}")


def _name(fn: Any) -> str:
    return "".join(c if c.isalnum() or c == "_" else "-" for c in getattr(fn, "__name__", "program"))


def _key(fn: Any, args: tuple[Any, ...], key: Any) -> str:
    """The digest of all that decides about the program except its sources; then the digest of those."""
    leaves, tree = jax.tree.flatten(args)
    told = {
        "function": f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', '')}",
        "tree": str(tree),
        "leaves": [[list(np.shape(leaf)), str(getattr(leaf, "dtype", type(leaf))), _sharding(leaf)] for leaf in leaves],
        "key": key,
        "devices": [[d.id, d.process_index, d.platform, d.device_kind] for d in jax.devices()],
        "platform": jax.devices()[0].client.platform_version,
        "process": [jax.process_index(), jax.process_count()],
        "flags": {name: os.environ.get(name) for name in _FLAGS},
        "settings": {
            name: repr(value)
            for name, value in sorted(jax.config.values.items())
            if "compilation_cache" not in name and "persistent_cache" not in name  # no part of a program
        },
        "python": sys.version,
        "versions": _versions(),
    }
    context = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=_KEY_BYTES)
    sources = hashlib.blake2b(digest_size=_KEY_BYTES)
    for path in sorted(_sources(fn)):
        with suppress(OSError):
            sources.update(hashlib.blake2b(Path(path).read_bytes()).digest())
    return f"{context.hexdigest()}-{sources.hexdigest()}"


def _sharding(leaf: Any) -> str:
    """Kind, devices and layout of a leaf's sharding; the text of a sharding leaves the devices out."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return ""
    indices = sharding.devices_indices_map(tuple(leaf.shape))
    placed = [[device.id, str(index)] for device, index in indices.items()]
    return json.dumps([str(sharding), sharding.memory_kind, placed])


def _sources(fn: Any) -> set[str]:
    """The Python files that `fn` is made from and people edit: its own, and those of the modules which that names, and
    so on; not those of installed packages. Not all imported modules: a forked start has imported more of them."""
    told = inspect.unwrap(fn)
    found = {told.__code__.co_filename} if hasattr(told, "__code__") else set[str]()
    left, seen = [getattr(told, "__module__", None)], set[str]()
    while left:
        name = left.pop()
        module = sys.modules.get(name) if isinstance(name, str) else None
        path = getattr(module, "__file__", None)
        if (
            not isinstance(name, str)
            or module is None
            or name in seen
            or not isinstance(path, str)
            or _is_installed(path)
        ):
            continue
        if module.__name__.partition(".")[0] == __name__.partition(".")[0]:  # imports its own names when they are used
            continue
        seen.add(name)
        found.add(path)
        for value in tuple(vars(module).values()):
            if not isinstance(value, ModuleType):
                left.append(getattr(value, "__module__", None))
            elif not value.__name__.startswith(f"{name}."):  # a module below this one is there once it was imported
                left.append(value.__name__)
    return found


def _is_installed(path: str) -> bool:
    within = path.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep))
    return within and ("site-packages" in path or "dist-packages" in path or f"lib{os.sep}python" in path)


def _versions() -> list[str]:
    """Name and version of each installed package, by the names of their metadata: 1 ms; to ask for them takes 0.2 s."""
    found = set[str]()
    for home in sys.path:
        with suppress(OSError):
            found.update(name for name in os.listdir(home or ".") if name.endswith((".dist-info", ".egg-info")))
    return sorted(found)


def _digest_of(lowered: jax.stages.Lowered) -> bytes:
    return hashlib.blake2b(lowered.as_text().encode(), digest_size=_HASH_BYTES).digest()


def _load(path: Path) -> tuple[jax.stages.Compiled, bytes] | None:
    """The program of a file and the digest of what it was made from; None where there is none that can be used."""
    try:
        data = _read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _logger.warning("%s is not used: %s", path, error)
        return None
    if data == _REFUTED:
        return None
    at = len(_MAGIC)
    digest, checksum, payload = (
        data[at : at + _HASH_BYTES],
        data[at + _HASH_BYTES :][:_HASH_BYTES],
        data[at + 2 * _HASH_BYTES :],
    )
    if not data.startswith(_MAGIC) or hashlib.blake2b(payload, digest_size=_HASH_BYTES).digest() != checksum:
        _logger.warning("%s is damaged: the program is compiled again", path)
        return None
    try:
        devices, *serialized = pickle.loads(payload)
        by_id = {device.id: device for device in jax.devices()}
        found = serialize_executable.deserialize_and_load(
            *serialized, execution_devices=[by_id[each] for each in devices]
        )
    except Exception as error:  # noqa: BLE001  JAX and XLA raise errors of many kinds here
        _logger.warning("%s cannot be loaded (%s): the program is compiled again", path, error)
        return None
    with suppress(OSError):
        os.utime(path)
    return found, digest


def _load_same(path: Path, digest: bytes) -> jax.stages.Compiled | None:
    """The program that was made from the same trace under other sources, such as a comment; kept as `path` now."""
    context = path.name.rpartition("-")[0]
    for other in path.parent.glob(f"{context}-*"):
        with suppress(OSError):
            if _read(other, len(_MAGIC) + _HASH_BYTES) == _MAGIC + digest:
                found = _load(other)
                if found is not None and found[1] == digest:
                    other.replace(path)
                    _logger.info("%s is loaded from %s: its sources changed, and its trace did not", context, path)
                    return found[0]
    return None


def _read(path: Path, size: int = -1) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(fd, "rb") as file:
        _refuse_others(os.fstat(fd), path)
        return file.read(size)


def _is_refuted(path: Path) -> bool:
    with suppress(OSError):
        return _read(path) == _REFUTED
    return False


def _keep(path: Path, program: jax.stages.Compiled, digest: bytes) -> None:
    try:
        devices = [device.id for device in _devices_of(program)]
        payload = pickle.dumps((devices, *serialize_executable.serialize(program)))
    except Exception as error:  # noqa: BLE001  a program that cannot be serialised, for reasons of many kinds
        _logger.warning("%s is not kept for the next start: %s", _name(program), error)
        return
    checksum = hashlib.blake2b(payload, digest_size=_HASH_BYTES).digest()
    try:
        write_whole(path, _MAGIC + digest + checksum + payload, mode=_MODE)
        _forget_oldest(path.parent)
    except OSError as error:
        _logger.warning("%s is not kept for the next start: %s", path, error)


def _devices_of(program: jax.stages.Compiled) -> list[Any]:
    """The devices of a program, in its order."""
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    for each in shardings:
        if isinstance(each, jax.sharding.NamedSharding) and isinstance(each.mesh, jax.sharding.Mesh):
            return list(np.asarray(each.mesh.devices).flat)
    return next((list(each.device_set) for each in shardings if len(each.device_set) == 1), jax.devices()[:1])


def _forget_oldest(home: Path) -> None:
    """Other processes write and delete here too: a file may vanish, and one with a dot is still being written."""
    ages: dict[Path, float] = {}
    for path in home.iterdir():
        with suppress(FileNotFoundError):
            if not path.name.startswith(".") and path.is_file():
                ages[path] = path.stat().st_mtime
    for path in sorted(ages, key=lambda path: ages[path])[:-_ENTRIES_MAX]:
        path.unlink(missing_ok=True)
