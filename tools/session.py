"""A recorded terminal session for the README: `make campaign NAME=pictures` writes docs/session.svg.

The commands run unchanged, in a terminal of their own, on a checkpoint that is saved first; only the directory's name
is shortened.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

SVG = Path(__file__).parents[1] / "docs" / "session.svg"
COMMANDS = (
    "ckptkit inspect run --sort bytes",
    "ckptkit diff run/100 run/200 --rtol 1e-3",
    "ckptkit reshard run/200 new/200 --mesh data=2,model=4",
)
COLUMNS = 124
_HOST = "host-a"
# A progress bar that is removed at its end, and a line of progress that the next one overwrites.
_ERASED = re.compile(r"[^\n]*\n\x1b\[\?25h\r\x1b\[1A\x1b\[2K|[^\n]*\r(?:\x1b\[K)*")


def save_steps(root: Path, **more: Any) -> None:
    """Two steps of a small model on four devices, as a job saves them; `more` is for the manager."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    import ckptkit

    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(seed: int, shape: tuple[int, ...], dtype: object, *spec: str | None) -> jax.Array:
        values = jax.random.normal(jax.random.key(seed), shape).astype(dtype)  # pyright: ignore[reportArgumentType]
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    params = {
        "embed": put(1, (512, 128), jnp.bfloat16, "fsdp"),
        "block0": {
            "attention": put(2, (128, 384), jnp.float32, None, "fsdp"),
            "mlp": put(3, (128, 512), jnp.float32, "fsdp"),
        },
        "norm": jnp.ones(128),
    }
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh, PartitionSpec()))
    options = ocp.CheckpointManagerOptions(save_interval_steps=100)
    settings: dict[str, Any] = {"host_id": _HOST, **more}
    with ckptkit.CheckpointManager(root, options=options, **settings) as manager:
        for step in (100, 200):
            state = {"params": params, "rng": key, "step": step}
            data = ocp.args.JsonSave({"position": 64 * step})  # pyright: ignore[reportCallIssue]
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=data)  # pyright: ignore[reportCallIssue]
            manager.save(step, args=args)
            manager.wait_until_finished()
            params["block0"]["mlp"] = params["block0"]["mlp"] * 1.01
            params["norm"] = params["norm"] + 1e-5


def shown(command: str, home: Path, *, codes: tuple[int, ...] = (0, 20), columns: int = COLUMNS) -> str:
    """The terminal's output of a command of the shell that is run in `home`. Raises RuntimeError for another code."""
    main, terminal = pty.openpty()
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(SVG.parents[1])}
    environment = {**os.environ, **paths, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=home, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    chunks = []
    try:
        while chunk := os.read(main, 65536):
            chunks.append(chunk)
    except OSError:  # Linux ends a terminal in this way once no process holds it
        pass
    finally:
        os.close(main)
    code = process.wait()
    if code not in codes:
        raise RuntimeError(f"{command} ended with {code}: {b''.join(chunks).decode()}")
    return _ERASED.sub("", b"".join(chunks).decode().replace("\r\n", "\n"))


def picture(session: Iterable[tuple[str, str]]) -> str:
    """Commands with their output as an SVG."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        for command, output in session:
            console.print(Text("$ ", style="green") + Text(command, style="bold"))
            console.print(Text.from_ansi(output))
        # rich names fonts on a foreign server: our pages load nothing from other servers.
        return re.sub(
            r"@font-face \{.*?\}\s*", "", console.export_svg(title="ckptkit", unique_id="ckptkit"), flags=re.DOTALL
        )


def record(commands: tuple[str, ...] = COMMANDS) -> str:
    """The session as an SVG."""
    with tempfile.TemporaryDirectory(prefix="ckptkit-session-") as made:
        home = Path(made).resolve()
        save_steps(home / "run")
        (home / "new").mkdir()
        return picture((command, shown(command, home).replace(str(home), "/data")) for command in commands)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    SVG.write_text(record())
    sys.exit(0)
