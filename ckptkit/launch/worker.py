"""A Python worker of `ckptkit run`, and the template that workers are forked from. Run as a script, by path.

    python worker.py direct FD    runs one order from the file FD, in this process
    python worker.py template FD  imports what a program imports first, then forks a process for each order

Only the standard library is imported here: what else a worker imports is the job's own affair. The rules are those of
decision 9.
"""

import os
import sys

# The folder of this file has no modules for the job.
if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]

import ctypes
import faulthandler
import gc
import importlib.machinery
import importlib.util
import io
import json
import random
import runpy
import signal
import socket
import struct
import threading
import time
import traceback
import types
import warnings
from collections.abc import Iterable

DUMP_SIGNAL = signal.SIGRTMIN + 7  # the stacks of all threads go to stderr; a job may have SIGUSR1 and SIGUSR2
_FDS_MAX = 250
_HEADER = struct.Struct("<I")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_ADOPTION_S = 10.0
_LISTENER_S = 30.0


def main() -> None:
    """Runs an order; in a template, in each of its children."""
    mode, fd = sys.argv[1], int(sys.argv[2])
    _set_title("ckptkit: template of workers")
    if mode == "direct":
        with open(fd, "rb", closefd=True) as file:
            order = json.loads(file.read())
        _die_with(order["agent"])
        _enter(order["command"])
    else:
        order = _Template(socket.socket(fileno=fd)).serve()
    run(order)


def run(order: dict) -> None:
    """Becomes the command of an order: its `__main__`, its arguments, its exit."""
    command = order["command"]
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    _libc_prctl(_PR_SET_NAME, f"{order['process']}:{os.path.basename(command['target'])}"[:15].encode())
    words = " ".join(["python", *command["named"], *order["arguments"]])
    _set_title(f"ckptkit: process {order['process']} of {os.environ.get('CKPTKIT_PROCESSES', '?')}: {words}")
    if order.get("beats") is not None:
        _start_beats(order["beats"])
    if not _tell_jax():
        sys.meta_path.insert(0, _TellsJax())
    sys.argv = [command["target"], *order["arguments"]]
    sys.orig_argv = [sys.executable, *command["options"], *command["named"], *order["arguments"]]
    before, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        _RUN[command["kind"]](command["target"])
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  the top of a process: what Python prints, without our own frames
        error.__traceback__ = _without_ours(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        known = sys.modules.get("ckptkit.errors")  # a restart would end in the same way: the script has to be changed
        sys.exit(2 if known is not None and isinstance(error, known.NotJoinedError) else 1)
    finally:
        del before  # until here: its globals are this module's


def _run_script(path: str) -> None:
    main_module = sys.modules["__main__"]
    path = os.path.join(os.getcwd(), path)  # as Python itself does: frames are found after a change of the directory
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main_module.__dict__.update(__file__=path, __loader__=loader, __builtins__=__builtins__, __cached__=None)
    exec(code, main_module.__dict__)


def _run_module(name: str) -> None:
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]  what `python -m` itself calls


_RUN = {"script": _run_script, "module": _run_module}


def _without_ours(frames: types.TracebackType | None) -> types.TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


def _enter(command: dict) -> None:
    """The first entry of `sys.path` as the interpreter itself would set it."""
    if sys.flags.isolated or sys.flags.safe_path:
        return
    first = os.path.dirname(os.path.realpath(command["target"])) if command["kind"] == "script" else os.getcwd()
    sys.path.insert(0, first)


def _libc_prctl(option: int, value: object) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _set_title(title: str) -> None:
    """Gives this process a title for `ps`: writes it over the arguments, of which Python has a copy. Too long a title
    is cut."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5), 48 and 49 there
    room = end - start
    if room > 1:
        ctypes.memmove(start, title.encode(errors="replace")[: room - 1].ljust(room, b"\0"), room)


def _die_with(parent: int) -> None:
    """SIGKILL when the parent ends, also where it has ended already."""
    _libc_prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _start_beats(fd: int) -> None:
    """The library marks the job's steps in this file. An environment without ckptkit has no beats."""
    try:
        from ckptkit.util import heartbeat
    except ImportError:
        os.close(fd)
        return
    heartbeat.start(fd)


def _tell_jax() -> bool:
    """Makes `jax.distributed.initialize()` without arguments find this job; False where JAX is not imported yet."""
    cluster = sys.modules.get("jax._src.clusters.cluster")
    if cluster is None or not hasattr(cluster, "ClusterEnv"):
        return False

    class CkptkitRun(cluster.ClusterEnv):  # type: ignore[name-defined, misc]
        """This job, as JAX asks for it: from the environment of the worker."""

        name = "ckptkit"

        @classmethod
        def is_env_present(cls) -> bool:
            return "CKPTKIT_COORDINATOR" in os.environ

        @classmethod
        def get_coordinator_address(cls, timeout_secs: object = None, override_coordinator_port: object = None) -> str:
            del timeout_secs, override_coordinator_port
            address = os.environ["CKPTKIT_COORDINATOR"]
            if cls.get_process_id() != 0:
                _await_listener(address)
            return address

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["CKPTKIT_PROCESSES"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["CKPTKIT_PROCESS"])

        @classmethod
        def get_local_process_id(cls) -> int | None:
            """Of several processes on a host each has one accelerator, as under srun and mpirun."""
            return int(os.environ["CKPTKIT_LOCAL_PROCESS"]) if int(os.environ["CKPTKIT_LOCAL_PROCESSES"]) > 1 else None

    types = cluster.ClusterEnv._cluster_types  # the first that is present is asked
    types.insert(0, types.pop(types.index(CkptkitRun)))
    return True


def _await_listener(address: str) -> None:
    """Returns once process 0 listens, or after `_LISTENER_S`, which leaves the error to JAX. A connection that is
    refused is tried again by gRPC only a second later: half of the time of a restart."""
    host, _, port = address.rpartition(":")
    ends_s = time.monotonic() + _LISTENER_S
    while time.monotonic() < ends_s:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.01)


class _TellsJax:
    """A finder that finds nothing: it waits until JAX has the class that `_tell_jax` needs."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Tries again at each import."""
        del name, path, target
        if _tell_jax():
            sys.meta_path.remove(self)


class _Template:
    """The process that has imported what the job imports, and forks workers that begin there."""

    def __init__(self, agent: socket.socket):
        self._socket = agent
        self._watches = _neighbour("import_watch")
        self._threads = 1
        self._sources: list[str] = []  # files of the program that were read to find its first imports
        self._files: dict[str, tuple[int, int, int]] = {}
        self._open_before: frozenset[str] = frozenset()

    def serve(self) -> dict:
        """Returns in each worker, with its order; the template itself ends here, with its agent."""
        setup, _ = self._receive()
        _die_with(setup["agent"])
        _enter(setup["command"])
        sys.argv = [setup["command"]["target"], *setup["arguments"]]
        self._open_before = _open_files()
        statements = [f"import {name}" for name in setup["modules"]]
        if not statements:
            command = setup["command"]
            first = _neighbour("first_imports").FirstImports(command["kind"], command["target"])
            statements, self._sources = first.statements, first.files
            if not statements:
                self._send({"cold": first.reason})
                os._exit(0)
        self._import(statements, is_asked=bool(setup["modules"]))
        while True:
            request, fds = self._receive()
            reason = self._why_not(frozenset(map(str, fds))) or self._changed()
            if reason is not None:
                self._send({"unsafe": reason})
                os._exit(0)
            order = self._fork_all(request, fds)
            if order is not None:
                return order
            for fd in fds:
                os.close(fd)

    def _import(self, statements: list[str], *, is_asked: bool) -> None:
        """Imports what the statements do and reports that. Ends the process where it may not be forked any more.

        Of the modules that the user asks for, those that cannot be imported are left to the worker, with their errors.
        """
        started_s = time.monotonic()
        files = _stats_of(self._sources)
        lost = self._watches.Lost()
        watch = self._watches.ImportWatch(lost)
        sys.meta_path.insert(0, watch)
        for statement in statements:
            try:
                exec(statement, {})
                reason = None
            except BaseException as error:  # noqa: BLE001  what a module raises here it will raise in the worker too
                reason = None if is_asked else f"{type(error).__name__}: {error}"
            self._threads = 1 + watch.started
            if (reason := reason or self._why_not() or lost.what) is not None:
                name = statement.split()[1]
                self._send({"unsafe": f"importing {name}: {reason}", "culprit": name})
                os._exit(0)
        lost.end()
        sys.meta_path.remove(watch)
        gc.collect()
        gc.freeze()  # a collection in a worker would copy every page that it marks
        self._files = _files_of_modules() | files
        self._send({"imported": len(sys.modules), "seconds": round(time.monotonic() - started_s, 3)})

    def _why_not(self, received: frozenset[str] = frozenset()) -> str | None:
        """Why this process must not be forked; None where it may. `received` are the workers' own files."""
        bridge, distributed = sys.modules.get("jax._src.xla_bridge"), sys.modules.get("jax._src.distributed")
        if bridge is not None and getattr(bridge, "_backends", None):
            return "JAX has a backend already"
        if distributed is not None and getattr(distributed.global_state, "client", None) is not None:
            return "JAX is connected to a coordinator already"
        if others := [each.name for each in threading.enumerate() if each is not threading.main_thread()]:
            return f"the Python thread {others[0]} runs"
        threads = len(os.listdir("/proc/self/task"))
        if threads > self._threads:
            return f"{threads - self._threads} threads of C code run"
        return self._open_file(received)

    def _open_file(self, received: frozenset[str]) -> str | None:
        for fd in _open_files() - self._open_before - received:
            target = os.readlink(f"/proc/self/fd/{fd}")
            with open(f"/proc/self/fdinfo/{fd}") as info:
                mode = int(next(line for line in info if line.startswith("flags:")).split()[1], 8) & os.O_ACCMODE
            if target.startswith("socket:"):
                return "a socket is open"
            if target.startswith("/") and not target.startswith("/dev/") and mode != os.O_RDONLY:
                return f"{target} is open for writing"
        return None

    def _changed(self) -> str | None:
        """A source file of a module that is no longer what was imported."""
        for path, found in self._files.items():
            if _stat_of(path) != found:
                return f"{path} has changed since it was imported"
        return None

    def _fork_all(self, request: dict, fds: list[int]) -> dict | None:
        """The order, in each worker; None in the template once all run as children of the agent."""
        orders, each = request["orders"], request["fds"]
        theirs = [fds[number * each : (number + 1) * each] for number in range(len(orders))]
        pids_fd, write_fd = os.pipe()
        with warnings.catch_warnings():  # Python 3.12 warns of OpenBLAS's thread, which a fork does not have
            warnings.simplefilter("ignore")
            middle = os.fork()
            if middle == 0:
                middle = os.getpid()
                for order, own in zip(orders, theirs, strict=True):
                    if os.fork() == 0:
                        self._become_worker(order, own, [fd for fd in fds if fd not in own], middle, write_fd)
                        os.close(pids_fd)
                        return order
                os._exit(0)
        os.close(write_fd)
        os.waitpid(middle, 0)
        packed = b""
        while chunk := os.read(pids_fd, 65536):
            packed += chunk
        os.close(pids_fd)
        pids = dict(struct.iter_unpack("<ii", packed))
        self._send({"pids": [pids[order["process"]] for order in orders]})
        return None

    def _become_worker(self, order: dict, own: list[int], others: list[int], middle: int, write_fd: int) -> None:
        os.setsid()
        end_s = time.monotonic() + _ADOPTION_S
        os.write(write_fd, struct.pack("<ii", order["process"], os.getpid()))
        os.close(write_fd)
        while os.getppid() == middle and time.monotonic() < end_s:
            time.sleep(0.0002)
        _die_with(order["agent"])
        self._socket.close()
        for fd in others:
            os.close(fd)
        output, *rest = own
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        order |= dict(zip(order["files"], rest, strict=True))
        for name, value in order["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        random.seed()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # else every worker would draw the same numbers

    def _send(self, message: dict) -> None:
        body = json.dumps(message).encode()
        self._socket.sendall(_HEADER.pack(len(body)) + body)

    def _receive(self) -> tuple[dict, list[int]]:
        """The next message of the agent. Ends the process if the agent has ended."""
        header, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size, _FDS_MAX)
        header += self._read(_HEADER.size - len(header))
        (size,) = _HEADER.unpack(header)
        return json.loads(self._read(size)), list(fds)

    def _read(self, size: int) -> bytes:
        body = b""
        while len(body) < size:
            chunk = self._socket.recv(size - len(body))
            if not chunk:
                os._exit(0)
            body += chunk
        return body


def _neighbour(name: str) -> types.ModuleType:
    """A module in the folder of this file, which is not in the path."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _open_files() -> frozenset[str]:
    """Not the directory that is open for the listing."""
    return frozenset(fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}"))


def _files_of_modules() -> dict[str, tuple[int, int, int]]:
    return _stats_of(getattr(module, "__file__", None) for module in list(sys.modules.values()))


def _stats_of(paths: Iterable[str | None]) -> dict[str, tuple[int, int, int]]:
    return {path: found for path in set(paths) if path and (found := _stat_of(path)) is not None}


def _stat_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        traceback.print_exception(error)
        sys.exit(1)
