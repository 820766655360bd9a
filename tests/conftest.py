"""Every test process has four CPU devices and compiles quickly, set before JAX is imported."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# The first two save a sixth of the processor time of a test that trains.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_force_host_platform_device_count=4"
)
# gcsfs asks Google for a bucket's kind over gRPC at first use; an emulator does not have it.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Where it is set, each process compiles ckptkit anew, and each worker all tests: 7 seconds of processor time.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ckptkit.store.remote import forget_listings
from tests import skips
from tests.mounts import Mounts

if TYPE_CHECKING:
    from ckptkit.slots.arena import Arena
    from ckptkit.testing.bucket import BucketServer
    from tests.mount import MountedBucket

sys.dont_write_bytecode = False

# All processes of a run keep what they compile in one directory: a small program compiles in 30 to 60 ms of processor
# time and loads in 5, a trainer's step in eight seconds and 0.3.
COMPILED = "JAX_COMPILATION_CACHE_DIR"
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Directories of tests are in memory where it has room, unless a test has `mark.disk`: on a disk they wait for fsync for
# a fifth of the time.
MEMORY, MEMORY_BYTES = "/dev/shm", 12 << 30
if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
if not IS_WORKER:
    os.environ[COMPILED] = tempfile.mkdtemp(prefix="ckptkit-tests-compiled-")
jax.config.update("jax_compilation_cache_dir", os.environ[COMPILED])


def pytest_configure(config: pytest.Config) -> None:
    """Also where `-o addopts=` is given."""
    config.pluginmanager.register(skips)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collecting makes a million objects that live as long as the process: no garbage collection looks at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def _last_lines(text: str, lines: int = 40, columns: int = 300) -> str:
    """Orbax logs a page for each save that fails, and the report of a failure would be hard to find among them."""
    return "\n".join(line[:columns] for line in text.splitlines()[-lines:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Shows the last lines of a test's log."""
    report = yield
    report.sections = [(name, _last_lines(text)) for name, text in report.sections]
    return report


# Long files begin first (Makefile: --no-loadscope-reorder), or one worker would run the last of them alone.
LONG = {"multiprocess", "bench", "trainer", "docs", "tools", "testing", "simulation", "roots", "strangers", "launch"}
SLOWEST = 10
_spent_s: dict[str, float] = defaultdict(float)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the folders of `LONG` first."""
    items.sort(key=lambda item: LONG.isdisjoint(item.nodeid.split("/")))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up the time of each file, where the results of all workers arrive."""
    _spent_s[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the files that took longest."""
    if len(_spent_s) > SLOWEST:
        terminalreporter.section(f"slowest {SLOWEST} files")
        for name, spent_s in sorted(_spent_s.items(), key=lambda each: -each[1])[:SLOWEST]:
            terminalreporter.write_line(f"{spent_s:.1f} s  {name}")


def pytest_unconfigure() -> None:
    """The process that made the directory of compiled programs removes it."""
    if not IS_WORKER:
        shutil.rmtree(os.environ[COMPILED], ignore_errors=True)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """As pytest's, and on a disk for tests with `mark.disk`."""
    if request.node.get_closest_marker("disk") is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ckptkit-test-") as made:
        yield Path(made).resolve()


@pytest.fixture(scope="module", autouse=True)
def one_compile_cache() -> Iterator[None]:
    """A trainer in this process may have a cache of its own; the next file has the common one again."""
    yield
    if jax.config.jax_compilation_cache_dir != os.environ[COMPILED]:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", os.environ[COMPILED])
        compilation_cache.reset_cache()


@pytest.fixture
def orbax_may_fail() -> Iterator[None]:
    """An operation of stock Orbax that fails leaves coroutines behind, which raise when they are collected: here, where
    the test ignores it (`PytestUnraisableExceptionWarning`), and not in a later test."""
    yield
    gc.collect()


@pytest.fixture
def host() -> Iterator[Path]:
    """A host directory on the ramdisk, not made yet, gone when the test ends."""
    from tests.slots.arenas import new_host

    path = new_host()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def arena(host: Path) -> Iterator[Arena]:
    """Two slots in it."""
    from ckptkit.slots.arena import Arena

    made = Arena.open(host, 0, slots=2, synced=False)
    yield made
    made.close()


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    """Small mounts, unmounted at the end."""
    made = Mounts()
    yield made
    made.close()


@pytest.fixture
def mounted_bucket(tmp_path: Path) -> Iterator[MountedBucket]:
    """A bucket that a FUSE program mounts, empty."""
    from tests.mount import MountedBucket, why_not

    if (reason := why_not()) is not None:
        pytest.skip(f"no FUSE file system can be mounted here: {reason}")
    with MountedBucket(tmp_path / "mounted") as made:
        yield made


@pytest.fixture(autouse=True)
def forget_buckets() -> Iterator[None]:
    """gcsfs remembers what it listed for as long as the process lives; the next test's bucket has the same name."""
    yield
    if "gcsfs" in sys.modules:
        forget_listings("gs://")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """Buckets of the test's own, one of them `runs`, where this process's clients find them."""
    from ckptkit.testing.bucket import BucketServer, FaultPlan

    with BucketServer(dir=tmp_path / "bucket", buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        yield server
        server.faults = FaultPlan()  # hanging requests are released, or the end would wait for them
