"""Compiled programs over restarts: the same bits, never another program in a checkpoint, never a stranger's pickle."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckptkit
from ckptkit.errors import ProgramChangedError
from ckptkit.resume import CompiledProgram, compiled
from ckptkit.util import unproven
from tests.forked import run_forked

X = jnp.arange(8.0)


@pytest.fixture(autouse=True)
def nothing_unproven() -> Iterator[None]:
    """A refuted program forbids all saves of its process."""
    yield
    unproven._proofs.clear()


def scaled(by: float) -> Any:
    """A jitted function whose constant is not in its source."""

    def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        return {"w": state["w"] + by * x}, jnp.sum(x)

    return jax.jit(step, donate_argnums=0)


def state() -> dict[str, jax.Array]:
    return {"w": jnp.ones(8)}


def program_of(by: float, cache: Path, **more: Any) -> CompiledProgram:
    return compiled(scaled(by), state(), X, cache=cache, **more)


def test_second_start_loads_the_program_and_proves_it(tmp_path: Path) -> None:
    """A restart would trace again, or go on with a program that nobody has compared."""
    first = program_of(2.0, tmp_path)
    second = program_of(2.0, tmp_path)
    assert (first.origin, second.origin) == ("compiled", "loaded")
    np.testing.assert_array_equal(second(state(), X)[0]["w"], first(state(), X)[0]["w"])
    second.wait_until_proven()
    np.testing.assert_array_equal(second(state(), X)[0]["w"], 1 + 2 * np.arange(8))
    assert not unproven._proofs
    donated = state()
    second(donated, X)
    assert donated["w"].is_deleted()


def test_trace_does_not_run_beside_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step after a restart would share its cores with the trace, and the job be back later."""
    traced, ended = threading.Event(), threading.Event()
    waited_for: list[Any] = []

    def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        traced.set()
        return {"w": state["w"] + 2.0 * x}, jnp.sum(x)

    def wait(leaf: Any) -> None:
        waited_for.append(leaf)
        ended.wait(60)
        leaf.delete()
        raise RuntimeError("Array has been deleted")

    function = jax.jit(step, donate_argnums=0)
    compiled(function, state(), X, cache=tmp_path)
    jax.clear_caches()
    traced.clear()
    program = compiled(function, state(), X, cache=tmp_path)
    assert program.origin == "loaded"
    monkeypatch.setattr(jax, "block_until_ready", wait)
    loss = program(state(), X)[1]
    assert not traced.wait(0.1)
    ended.set()
    program.wait_until_proven()
    assert traced.is_set()
    assert [leaf is loss for leaf in waited_for] == [True]


def test_changed_program_is_never_saved_and_compiled_at_the_next_start(tmp_path: Path) -> None:
    """A state of the old program would be trained on and saved, or every other start would fail without end."""
    program_of(2.0, tmp_path / "cache")
    stale = program_of(3.0, tmp_path / "cache")
    assert stale.origin == "loaded"
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(ProgramChangedError, match="none of them was saved"):
            manager.save(0, args=ocp.args.StandardSave(state()))  # pyright: ignore[reportCallIssue]
        assert manager.all_steps() == []
    with pytest.raises(ProgramChangedError):
        stale(state(), X)
    for _ in range(2):  # what one key has stood for twice is not kept again
        fresh = program_of(3.0, tmp_path / "cache")
        assert fresh.origin == "compiled"
        np.testing.assert_array_equal(fresh(state(), X)[0]["w"], 1 + 3 * np.arange(8))


def test_save_that_is_not_due_does_not_wait_for_the_proof(tmp_path: Path) -> None:
    """The second step would wait for the trace, and nothing would be gained."""
    program_of(2.0, tmp_path / "cache")
    options = ocp.CheckpointManagerOptions(save_interval_steps=2)
    with ckptkit.CheckpointManager(tmp_path / "run", options=options) as manager:
        args = ocp.args.StandardSave(state())  # pyright: ignore[reportCallIssue]
        assert manager.save(0, args=args)
        program = program_of(2.0, tmp_path / "cache")
        assert not manager.save(1, args=args)
        assert unproven._proofs
        assert manager.save(2, args=args)
        assert not unproven._proofs
    program.wait_until_proven()


@pytest.mark.parametrize(
    "other",
    [
        lambda cache: program_of(2.0, cache, key={"layers": 3}),
        lambda cache: compiled(scaled(2.0), {"w": jnp.ones(8)}, jnp.arange(8), cache=cache),
        lambda cache: compiled(scaled(2.0), {"w": jnp.ones((1, 8))}, X, cache=cache),
        lambda cache: compiled(jax.jit(lambda state, x: (state, x)), state(), X, cache=cache),
        lambda cache: compiled(scaled(2.0), *jax.device_put((state(), X), jax.devices()[1]), cache=cache),
    ],
    ids=["key", "dtype", "shape", "function", "device"],
)
def test_other_programs_are_told_apart(tmp_path: Path, other: Callable[[Path], CompiledProgram]) -> None:
    """A job with other settings would load this one's program, and end after its first step."""
    program_of(2.0, tmp_path, key={"layers": 2})
    assert other(tmp_path).origin == "compiled"


@pytest.mark.long
def test_programs_are_kept_beside_the_compilation_cache_of_jax(tmp_path: Path) -> None:
    """XLA on CPU serialises a program of JAX's cache without its functions: later starts would fail in their first
    step. A program that is not kept instead would never be, and each start would trace before its first step."""
    code = (
        "import sys, jax, jax.numpy as jnp, ckptkit\n"
        "jax.config.update('jax_compilation_cache_dir', 'jax')\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)\n"
        "def loss(w, x):\n"
        "    h, _ = jax.lax.scan(lambda h, each: (jnp.tanh(h @ each) * jax.nn.softmax(h), None), x, w)\n"
        "    return jnp.sort(h, axis=-1).sum()\n"
        "step = jax.jit(jax.grad(loss))\n"
        "w, x = jnp.ones((4, 64, 64)), jnp.ones((64, 64))\n"
        "if sys.argv[2] == 'called':\n"
        "    step(w, x)\n"
        "program = ckptkit.resume.compiled(step, w, x, cache=sys.argv[1])\n"
        "print(program.origin, float(program(w, x).sum()))\n"
        "jax.jit(lambda x: x + 12.0)(x)\n"
    )
    script = tmp_path / "train.py"

    def start(comment: str, cache: str = "a", before: str = "not called") -> str:
        script.write_text(f"# {comment}\n{code}")
        command = [sys.executable, str(script), cache, before]
        return run_forked(command, cwd=tmp_path, timeout=120, check=True).stdout.split()[0]

    assert [start("first", before="called"), start("first")] == ["compiled", "loaded"]
    assert any(path.name.startswith("jit__lambda") for path in (tmp_path / "jax").iterdir()), "JAX has its cache"
    assert [start("edited"), start("edited"), start("first")] == ["loaded", "loaded", "loaded"]
    # JAX's cache has the program, since it was called there; this cache has it not.
    assert [start("edited", "b", "called"), start("edited", "b")] == ["compiled", "loaded"]
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_program_that_fails_in_its_first_step_is_compiled_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later start would load it, and fail."""

    def fail(leaf: Any) -> None:
        raise RuntimeError("Function add_convert_fusion not found")

    program_of(2.0, tmp_path)
    program = program_of(2.0, tmp_path)
    monkeypatch.setattr(jax, "block_until_ready", fail)
    with suppress(RuntimeError):  # of the proof, if it has failed by then
        program(state(), X)
    with pytest.raises(RuntimeError, match="add_convert_fusion"):
        program.wait_until_proven()
    assert program_of(2.0, tmp_path).origin == "compiled"


def test_changed_setting_of_jax_is_another_program(tmp_path: Path) -> None:
    """Matrix products would have the precision of the first start."""
    program_of(2.0, tmp_path)
    before = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        assert program_of(2.0, tmp_path).origin == "compiled"
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def test_program_of_a_mesh_is_loaded_and_proven_within_set_mesh(tmp_path: Path) -> None:
    """The proof would trace without the mesh of the step loop's thread, and refute what is right."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data", "fsdp")))

    def step(w: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(w @ w, P("data"))

    with jax.set_mesh(mesh):
        programs = [compiled(jax.jit(step), w, cache=tmp_path) for _ in range(2)]
        assert [each.origin for each in programs] == ["compiled", "loaded"]
        value = jax.device_put(jnp.arange(64.0).reshape(8, 8), w.sharding)
        found = [np.asarray(each(value)) for each in programs]
        programs[1].wait_until_proven()
    np.testing.assert_array_equal(found[0], found[1])


class Boom:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("who", ["directory", "file", "link"])
def test_pickle_that_others_may_have_written_is_not_loaded(
    tmp_path: Path, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Any user of the machine could run code as this one."""
    cache = tmp_path / "cache"
    program_of(2.0, cache)
    (kept,) = cache.iterdir()
    body = kept.read_bytes()
    payload = pickle.dumps(Boom(tmp_path / "ran"))
    from hashlib import blake2b

    at = len(b"ckptkit program 1\n") + 32
    kept.write_bytes(body[:at] + blake2b(payload, digest_size=32).digest() + payload)
    if who == "directory":
        cache.chmod(0o770)
    elif who == "file":
        kept.chmod(0o666)
    else:
        kept.rename(tmp_path / "elsewhere")
        kept.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, "ckptkit"):
        assert program_of(2.0, cache).origin == "compiled"
    assert caplog.records
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "other"])
def test_damaged_program_is_compiled_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit would be machine code that runs."""
    program_of(2.0, tmp_path)
    (kept,) = tmp_path.iterdir()
    data = bytearray(kept.read_bytes())
    data[-100] ^= 1
    kept.write_bytes({"bit": bytes(data), "cut": bytes(data[:-10]), "empty": b"", "other": b"x" * 4096}[damage])
    with caplog.at_level(logging.WARNING, "ckptkit"):
        assert program_of(2.0, tmp_path).origin == "compiled"
    assert "is damaged" in caplog.text
    assert program_of(2.0, tmp_path).origin == "loaded", "it was replaced"


def test_cache_that_cannot_be_written_costs_the_cache_alone(tmp_path: Path) -> None:
    """A full disk would end the training at its start."""
    (tmp_path / "file").write_text("")
    assert program_of(2.0, tmp_path / "file" / "cache").origin == "compiled"
    assert compiled(scaled(2.0), state(), X, cache=None).origin == "compiled"


SCRIPT = """
import sys
import jax, jax.numpy as jnp
import ckptkit
import mine
program = ckptkit.resume.compiled(jax.jit(mine.step), jnp.ones(8), cache=sys.argv[1])
print(program.origin, program(jnp.ones(8))[0])  # and the process ends while the program is traced
"""


@pytest.mark.long
def test_changed_source_is_compiled_at_the_next_start(tmp_path: Path) -> None:
    """A person who mends a step would go on with the old one, or lose a start."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def start(factor: int) -> str:
        (tmp_path / "mine.py").write_text(f"def step(x):\n    return {factor} * x\n")
        command = [sys.executable, "train.py", str(tmp_path / "cache")]
        # Two sources of one size in one second have the same bytecode.
        env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.strip()

    assert [start(2), start(2), start(3)] == ["compiled 2.0", "loaded 2.0", "compiled 3.0"]


def test_only_the_newest_programs_are_kept(tmp_path: Path) -> None:
    """A job that is started often would fill the disk."""
    for number in range(70):
        (tmp_path / f"old-{number}").write_bytes(b"")
    half_written = tmp_path / ".step-1.7"  # by another process
    half_written.write_bytes(b"")
    os.utime(half_written, (0, 0))
    program_of(2.0, tmp_path)
    assert half_written.exists()
    assert len(list(tmp_path.iterdir())) == 65
    assert program_of(2.0, tmp_path).origin == "loaded"


def test_python_numbers_are_arguments(tmp_path: Path) -> None:
    """A step that takes its rate as a number would not compile."""
    programs = [compiled(jax.jit(lambda x, rate: x * rate), X, 0.5, cache=tmp_path) for _ in range(2)]
    assert [each.origin for each in programs] == ["compiled", "loaded"]
    np.testing.assert_array_equal(programs[1](X, 0.25), np.arange(8) * 0.25)
