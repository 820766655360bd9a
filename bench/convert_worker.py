"""One conversion in a process of its own: `cp` and fsync of the source, then the work, and the memory that it took."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import now_s

_LEAF_ROWS = 4096  # of 4 KiB each: 16 MiB, divided by 8, 4 and 2
_BLOCK_BYTES = 16 << 20


def make_source(path: Path, size_bytes: int) -> None:
    """A safetensors file of float32 leaves, of 16 to 256 MiB, and some small ones; random bits do not compress."""
    import numpy as np

    leaves: dict[str, tuple[int, int]] = {}
    left, rows = size_bytes, _LEAF_ROWS
    while left > 0:
        leaves[f"layers.{len(leaves)}.kernel"] = (rows, 1024)
        left -= rows * 4096
        rows = _LEAF_ROWS * (1 << (len(leaves) % 5)) if left > 16 * _LEAF_ROWS * 4096 else _LEAF_ROWS
    leaves |= {f"layers.{at}.bias": (8, 128) for at in range(len(leaves))}
    header: dict[str, Any] = {}
    at = 0
    for name, (high, wide) in leaves.items():
        header[name] = {"dtype": "F32", "shape": [high, wide], "data_offsets": [at, at + 4 * high * wide]}
        at += 4 * high * wide
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while at > 0:
            block = random.integers(0, 1 << 32, min(_BLOCK_BYTES, at) // 4, dtype=np.uint32)
            block &= np.uint32(0xBFFFFFFF)  # no NaN and no infinity: the obvious way compares too
            file.write(block.tobytes())
            at -= block.nbytes
        file.flush()
        os.fsync(file.fileno())


def copy_s(source: Path, target: Path) -> float:
    """Seconds of `cp -r` and fsync of every file."""
    start_s = now_s()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for directory, _, names in os.walk(target) if target.is_dir() else [(str(target.parent), [], [target.name])]:
        for name in names:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    took_s = now_s() - start_s
    remove(target)
    return took_s


def remove(path: Path) -> None:
    """A file or a directory, where there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def converting(source: Path, target: Path, to: str, memory_bytes: int) -> None:
    """The work of `ckptkit convert`."""
    from ckptkit.conversion import convert, plan_convert
    from ckptkit.formats import open_checkpoint

    with open_checkpoint(str(source)) as opened:
        plan = plan_convert(opened, str(target), to, memory_bytes=memory_bytes)  # pyright: ignore[reportArgumentType]
        convert(opened, plan, memory_bytes=memory_bytes)


def resharding(
    source: Path, target: Path, mesh: str, memory_bytes: int, spec: tuple[tuple[str, ...], ...] = ()
) -> None:
    """The work of `ckptkit reshard`, without rules or with one for all leaves."""
    from ckptkit.conversion.resharding import Mesh, open_source, plan_reshard, reshard
    from ckptkit.conversion.resharding.planning import SpecRule

    opened = open_source(str(source), timeout_s=20.0)
    with opened.opened:
        rules = [SpecRule(pattern="**", spec=spec)] if spec else []
        plan = plan_reshard(opened, str(target), [Mesh.parse(mesh)], rules=rules, memory_bytes=memory_bytes)
        reshard(opened, plan, memory_bytes=memory_bytes)


def resharding_both(source: Path, target: Path, mesh: str, memory_bytes: int) -> None:
    """The same where both dimensions of every leaf are split: each chunk of the target has a part of many rows."""
    resharding(source, target, mesh, memory_bytes, spec=(("data",), ("model",)))


def obvious_convert(source: Path, target: Path, to: str, memory_bytes: int) -> None:
    """Restores everything with stock Orbax and saves everything with the safetensors package."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from safetensors.numpy import save_file

    del to, memory_bytes
    restored = ocp.PyTreeCheckpointer().restore(source)
    flat, _ = jax.tree_util.tree_flatten_with_path(restored)
    save_file(
        {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in flat}, str(target)
    )
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def obvious_reshard(source: Path, target: Path, mesh: str, memory_bytes: int) -> None:
    """Restores everything onto the mesh with stock Orbax and saves it again, without compression."""
    import jax
    import orbax.checkpoint as ocp

    from ckptkit.conversion.resharding.meshes import Mesh, default_spec

    del memory_bytes
    words = Mesh.parse(mesh)
    types = (jax.sharding.AxisType.Auto,) * len(words.axes)
    real = jax.make_mesh([size for _, size in words.axes], [name for name, _ in words.axes], axis_types=types)

    def placed(leaf: Any) -> Any:
        spec = [part[0] if len(part) == 1 else part or None for part in default_spec(leaf.shape, words)]
        sharding = jax.sharding.NamedSharding(real, jax.sharding.PartitionSpec(*spec))
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)

    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        tree: Any = checkpointer.metadata(source)
        tree = getattr(getattr(tree, "item_metadata", tree), "tree", tree)
        args = ocp.args.PyTreeRestore(restore_args=jax.tree.map(placed, tree))
        state = checkpointer.restore(source, args=args)
        checkpointer.save(target, args=ocp.args.PyTreeSave(state))


WAYS: dict[str, Callable[[Path, Path, str, int], None]] = {
    "convert": converting,
    "reshard": resharding,
    "reshard-both": resharding_both,
    "obvious-convert": obvious_convert,
    "obvious-reshard": obvious_reshard,
}


def main() -> None:
    """`WAY SOURCE TARGET TO MEMORY`: prints seconds of the copy and of the work, bytes, and the peak of memory."""
    way, source, target, to, memory = sys.argv[1:]
    import jax

    jax.config.update("jax_platforms", "cpu")
    from ckptkit.cli.sources import keep_freed_memory
    from ckptkit.conversion import resharding  # imports are not what is measured

    assert resharding is not None
    if not way.startswith("obvious"):
        keep_freed_memory()  # as the commands do
    written = Path(target)
    copied_s = copy_s(Path(source), written.with_name("copy"))
    imported_bytes = peak_bytes()
    start_s = now_s()
    WAYS[way](Path(source), written, to, int(memory))
    took_s = now_s() - start_s
    sizes = [file.stat().st_size for file in [written, *written.rglob("*")] if file.is_file()]
    said = {"copy_s": copied_s, "work_s": took_s, "bytes": sum(sizes), "imports": imported_bytes, "peak": peak_bytes()}
    print(json.dumps(said))


def peak_bytes() -> int:
    """The most resident memory of this process so far, files that it has mapped included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
