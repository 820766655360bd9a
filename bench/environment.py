"""Where a measurement was made: without it, numbers mean nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "ckptkit-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "numpy",
    "xxhash",
    "torch",
)

# Of measured processes. An installed package has its bytecode: without it, a start compiles 250 modules (0.5 s).
WORKER_ENV = {"PYTHONDONTWRITEBYTECODE": ""}
_DISK = tempfile.gettempdir()


def environment(ramdisk: str = "/dev/shm", disk: str = _DISK) -> dict[str, Any]:
    """Versions, processor, kernel, memory, load, mounts and the commit that is measured."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shmem_hugepages": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "ramdisk": _mount(ramdisk),
        "disk": _mount(disk),
        "load": list(os.getloadavg()),
    }


def store_result(result: dict[str, Any], path: Path | None) -> None:
    """Writes the result of a benchmark, with the load of the machine at its end, as JSON; nothing without a path."""
    if path is None:
        return
    result["environment"]["load_after"] = list(os.getloadavg())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _mount(path: str) -> dict[str, Any]:
    """The mount that holds `path`: the longest mount point above it."""
    real = os.path.realpath(path)
    found = ("", "unknown", "unknown")
    for line in (_read("/proc/self/mounts") or "").splitlines():
        device, point, kind = line.split()[:3]
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = (point, kind, device)
    free = os.statvfs(path)
    return {"point": found[0], "type": found[1], "device": found[2], "free_bytes": free.f_bavail * free.f_frsize}


def _commit() -> str | None:
    """The commit of this checkout, with `+` where files differ from it; None outside a checkout."""
    root = Path(__file__).parent.parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
        if head.returncode:
            return None
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], cwd=root, capture_output=True, text=True
        )
    except OSError:  # no git
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
