"""Join the other processes, and leave without holding anybody up."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from ckptkit.launch import ExitCode
from trainer.config import ClusterConfig, InputError

# The variables by which `ckptkit run`, Open MPI's mpirun and Slurm's srun number processes. JAX reads the same names in
# this order: a process that one of them starts in a batch script of Slurm has the script's rank too.
_RANKS = (
    ("CKPTKIT_PROCESS", "CKPTKIT_PROCESSES"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def detect_rank(environ: Mapping[str, str]) -> dict[str, int]:
    """This process's `process` among `processes`, as set by its launcher.

    Raises:
        InputError: nothing did.
    """
    for rank, size in _RANKS:
        if rank in environ and size in environ:
            return {"process": int(environ[rank]), "processes": int(environ[size])}
    raise InputError(
        "--cluster detect: neither ckptkit run nor srun nor mpirun started this process; "
        "give --coordinator, --processes and --process instead"
    )


def join(config: ClusterConfig, compile_cache: str | None) -> None:
    """Connect to the other processes and turn the compilation cache on; comes before any other use of JAX.

    Raises:
        RuntimeError: from JAX, when the coordinator cannot be reached or a process is missing.
    """
    if compile_cache:
        use_compile_cache(compile_cache)
    if config.processes > 1 or config.coordinator:  # a single process too can then be notified of a preemption
        place: dict[str, Any] = {
            "coordinator_address": config.coordinator,
            "num_processes": config.processes,
            "process_id": config.process,
        }
        jax.distributed.initialize(
            **({} if config.detect else place),
            initialization_timeout=config.start_timeout_s,
            heartbeat_timeout_seconds=config.heartbeat_s,
            shutdown_timeout_seconds=3 * config.heartbeat_s,
        )
        if compile_cache and jax.default_backend() == "cpu":
            let_every_process_write_cache()


def use_compile_cache(directory: str) -> None:
    """Keep every compiled program in `directory`, small ones too."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def leave(config: ClusterConfig, code: int, *, at_once: bool = False) -> None:
    """End the process. After a failure it does not wait for peers, which may never come to a shutdown barrier.

    `at_once` waits for nothing at all, a save in flight included.
    """
    if config.processes == 1 and not at_once:
        sys.exit(code)
    if code in (0, ExitCode.PREEMPTED) and not at_once:
        jax.distributed.shutdown()
        # From here on this process waits for no other. srun and mpirun end the others once one has ended with 75. A
        # process that they end here would turn the preemption into a loss.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    if config.process == 0:
        time.sleep(1)  # the coordinator goes last, so that peers with the same fault can name it before they abort
    os._exit(code)


def let_every_process_write_cache() -> None:
    """Make a restart on CPU cheap for all processes, not only for process 0.

    JAX lets process 0 alone write the cache, counting on one key for all. On CPU the key holds the process's own
    devices, so the others never hit. This uses a private module (jax 0.10.2) and does nothing if that does not exist.
    """
    from jax._src import compiler, distributed

    write = getattr(compiler, "_cache_write", None)
    if write is None:
        return

    def write_as_process_0(*args: object, **kwargs: object) -> object:
        state = distributed.global_state
        process, state.process_id = state.process_id, 0
        try:
            return write(*args, **kwargs)
        finally:
            state.process_id = process

    compiler._cache_write = write_as_process_0  # type: ignore[attr-defined]
