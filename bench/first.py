"""`python -m bench first`: the first save of a process, which people watch, and its later ones.

Every contender gets a cold process for each sample, in turns. The process fills a state of 64 random arrays, saves it,
and changes it at once by a step that donates what is being saved; then it waits for the commit, and saves again. All
write to one memory-backed mount. After the last save the state is restored, and every bit is compared.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import click

from bench.environment import environment, store_result
from bench.figures import available
from bench.measure import whole_process

LEAVES: Final = 64
SAVES: Final = 4  # of a process; those from the third on are the later ones
_ROWS: Final = 1000
# A ramdisk alone; the same after `prepare`; the durable tier alone, on the same mount.
OURS: Final = ("ckptkit", "ckptkit_prepared", "ckptkit_durable")
FIGURES: Final = {
    "first_save_ms": (("save_s",), 0, 1e3, "the first `save` of a process holds its caller"),
    "later_save_ms": (("save_s",), 2, 1e3, "a later `save` holds its caller"),
    "first_both_s": (("save_s", "step_s"), 0, 1.0, "the first `save` and the step after it, which donates the state"),
    "later_both_s": (("save_s", "step_s"), 2, 1.0, "the same of a later `save`"),
    "first_committed_s": (("committed_s",), 0, 1.0, "from the first `save` to its commit"),
    "later_committed_s": (("committed_s",), 2, 1.0, "the same of a later `save`"),
}


def worker(who: str, gigabytes: str, home: str) -> None:
    """The saves of one contender, as one line of JSON: seconds by what they were spent on."""
    import jax
    import numpy as np

    from bench.measure import now_s, settle
    from bench.states import changed

    @jax.jit
    def marks(tree: Any) -> Any:
        """Of each leaf a sum that depends on every bit and on its place: a view of the arrays would bar donation."""

        def mark(leaf: jax.Array) -> jax.Array:
            bits = jax.lax.bitcast_convert_type(leaf, jax.numpy.uint32).reshape(-1)
            return (bits * (2 * jax.numpy.arange(bits.size, dtype=jax.numpy.uint32) + 1)).sum(dtype=jax.numpy.uint32)

        return jax.tree.map(mark, tree)

    random = np.random.default_rng(0)
    columns = max(1, round(float(gigabytes) * 1e9 / LEAVES / _ROWS / 4))
    device = jax.devices()[0]

    def leaf() -> jax.Array:
        return jax.device_put(random.random((_ROWS, columns), np.float32), device).copy().block_until_ready()

    state = jax.block_until_ready(changed({f"w{number:02}": leaf() for number in range(LEAVES)}))
    abstract = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding), state)
    contender = _contender(who, Path(home))
    expected: Any = None
    found: dict[str, list[float]] = {"save_s": [], "step_s": [], "committed_s": []}
    if who == "ckptkit_prepared":
        contender.prepare(abstract)
    for step in range(1, SAVES + 1):
        settle()
        if step == SAVES:
            expected = jax.block_until_ready(marks(state))
        began_s = now_s()
        contender.save(step, state)
        saved_s = now_s()
        state = jax.block_until_ready(changed(state))
        stepped_s = now_s()
        found["committed_s"].append(contender.committed_s() - began_s)
        found["save_s"].append(saved_s - began_s)
        found["step_s"].append(stepped_s - saved_s)
        contender.settled()
        if step < SAVES:
            contender.forget(step)
    del state  # with the slots and the restored state it would be more than a small machine has
    if jax.tree.map(int, marks(contender.restore(SAVES, abstract))) != jax.tree.map(int, expected):
        raise AssertionError(f"{who} restored other bits than it saved")
    contender.close()
    print("\n" + json.dumps(found))  # on a line of its own: libraries print too


def _contender(who: str, home: Path) -> Any:
    from bench.contenders import make_contenders
    from bench.contenders_ours import CkptKit, CkptKitDurable

    if who == "ckptkit_prepared":
        return CkptKit(home / who)
    if who == "ckptkit_durable":
        return CkptKitDurable(who, str(home / who), None)
    (made,) = make_contenders((who,), home)
    return made


def contenders() -> list[str]:
    """Ours, stock Orbax's ways, and those of torch that are installed."""
    return [*OURS, *(name for name in available() if name not in ("ckptkit", "limit"))]


def figures(samples: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """One value of each process for each of FIGURES: of the later saves the median."""

    def of(sample: Mapping[str, Sequence[float]], parts: Sequence[str], since: int) -> float:
        sums = [sum(values) for values in zip(*(sample[part] for part in parts), strict=True)]
        return sums[0] if since == 0 else median(sums[since:])

    return {
        figure: [scale * of(each, parts, since) for each in samples]
        for figure, (parts, since, scale, _) in FIGURES.items()
    }


@click.command(context_settings={"max_content_width": 120})
@click.option("--gb", "gigabytes", type=float, default=4.0, show_default=True, help="The state; 6 times it is needed.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Cold processes of each.")
@click.option("--contender", "asked", multiple=True, help="Only these, instead of all; repeatable.")
@click.option("--ramdisk", default="/dev/shm", show_default=True, help="A memory-backed mount, for everybody.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every sample, as JSON.")
def main(gigabytes: float, repeats: int, asked: tuple[str, ...], ramdisk: str, json_path: Path | None) -> None:
    """Measures the first save of a process and its later ones, by ckptkit, stock Orbax and torch, taking turns."""
    if unknown := sorted(set(asked) - set(contenders())):
        raise click.UsageError(f"--contender {unknown[0]}: choose among {', '.join(contenders())}")
    result: dict[str, Any] = {"benchmark": "first", "environment": environment(ramdisk), "gb": gigabytes}
    samples: dict[str, list[Mapping[str, list[float]]]] = {name: [] for name in asked or contenders()}
    for number in range(repeats):
        for who, found in samples.items():
            home = tempfile.mkdtemp(prefix="ckptkit-bench-", dir=ramdisk)
            try:
                output, _ = whole_process(["-m", "bench.first", who, str(gigabytes), home])
            finally:
                shutil.rmtree(home, ignore_errors=True)
            found.append(json.loads(output.splitlines()[-1]))
            click.echo(f"round {number + 1} of {repeats}: {who} {found[-1]}", err=True)
    result |= {"leaves": LEAVES, "repeats": repeats, "saves": SAVES, "samples": samples}
    for who, found in samples.items():
        told = ", ".join(f"{figure} {median(values):.3g}" for figure, values in figures(found).items())
        click.echo(f"{who}: {told}")
    store_result(result, json_path)


if __name__ == "__main__":
    worker(*sys.argv[1:])
