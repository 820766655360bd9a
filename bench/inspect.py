"""`python -m bench inspect`: the cost of inspecting 100,000 leaves, as a user does, compared with Orbax's own call."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.bars import INSPECT_OCDBT_S, INSPECT_OF_ORBAX, INSPECT_S
from bench.environment import environment, store_result
from bench.measure import whole_process
from ckptkit.model import paths as layout

_ROOT = Path(__file__).parent.parent
_PARTS = ("attention.query.kernel", "attention.out.kernel", "mlp.up.kernel", "mlp.down.kernel", "norm.scale")
_GROUPS = ("params", "opt_state.mu", "opt_state.nu")
_SHAPES = ((4, 2), (8,), (2, 2, 2), (8, 1))
OURS, ORBAX = "ckptkit", "orbax"
# The kind of checkpoint, and whether Orbax has a call for it.
CASES = {"safetensors": False, "sidecar": False, "ocdbt": True, "ocdbt-by-orbax": True}


@click.command()
@click.option("--leaves", type=click.IntRange(min=1), default=100_000, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--orbax-repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Of Orbax's own call.")
@click.option("--case", "asked", multiple=True, type=click.Choice(list(CASES)), help="Only these; repeatable.")
@click.option("--disk", default=tempfile.gettempdir(), show_default=True, help="A directory on a disk.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every sample, as JSON.")
def main(
    leaves: int, repeats: int, orbax_repeats: int, asked: tuple[str, ...], disk: str, json_path: Path | None
) -> None:
    """Times `ckptkit inspect` on checkpoints of many small leaves, whole processes, in turns.

    `ocdbt` is a step without our sidecars, written by ckptkit; `ocdbt-by-orbax` one that stock Orbax has written. On
    both Orbax's own metadata call is timed too, without its imports.
    """
    home = Path(tempfile.mkdtemp(prefix="ckptkit-bench-", dir=disk))
    chosen = asked or tuple(CASES)
    result: dict[str, Any] = {
        "benchmark": "inspect",
        "environment": environment(disk, disk),
        "leaves": leaves,
        "repeats": repeats,
        "cases": {},
    }
    try:
        paths = make_cases(home, leaves, chosen)
        for turn in range(repeats):
            for case in chosen:
                samples = result["cases"].setdefault(case, {})
                for who, sample in _measured(case, paths[case], leaves, turn < orbax_repeats).items():
                    samples.setdefault(who, []).append(sample)
                    sys.stderr.write(f"{case}, {who}: {sample['wall_s']:.2f} s, {sample['cpu_s']:.2f} CPU s\n")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    _show(result)
    store_result(result, json_path)


def names_of(leaves: int) -> list[str]:
    """Paths as a transformer with Adam has them, this many."""
    rows = -(-leaves // (len(_PARTS) * len(_GROUPS)))
    found = [f"{group}.layers.{row}.{part}" for group in _GROUPS for row in range(rows) for part in _PARTS]
    return found[:leaves]


def shape_of(at: int) -> tuple[int, ...]:
    """Of the leaf at this place: 32 bytes of float32."""
    return _SHAPES[at % len(_SHAPES)]


def make_cases(home: Path, leaves: int, cases: tuple[str, ...]) -> dict[str, Path]:
    """The checkpoints, each of the same leaves of 32 bytes."""
    paths = {"safetensors": home / "many.safetensors", "sidecar": home / "sidecar" / "1", "ocdbt": home / "ocdbt" / "1"}
    _write_safetensors(paths["safetensors"], names_of(leaves))
    if {"sidecar", "ocdbt"}.intersection(cases):
        paths["sidecar"].parent.mkdir()
        whole_process(
            ["-m", "ckptkit.cli", "convert", str(paths["safetensors"]), str(paths["sidecar"]), "--to", "orbax"]
        )
    if "ocdbt" in cases:
        shutil.copytree(paths["sidecar"], paths["ocdbt"])
        _without_sidecars(paths["ocdbt"])
    if "ocdbt-by-orbax" in cases:
        paths["ocdbt-by-orbax"] = home / "by-orbax"
        whole_process(["-m", "bench.inspect_worker", "save", str(paths["ocdbt-by-orbax"]), str(leaves)])
    return paths


def _write_safetensors(path: Path, names: list[str]) -> None:
    header: dict[str, Any] = {}
    for at, name in enumerate(names):
        header[name] = {"dtype": "F32", "shape": shape_of(at), "data_offsets": [32 * at, 32 * at + 32]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32 * len(names)))


def _without_sidecars(item: Path) -> None:
    """The rest is what stock Orbax would have written: its own files, without ours."""
    shutil.rmtree(item / layout.SIDECAR_DIR)
    for path in (item / "array_metadatas").iterdir():
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != layout.SIDECAR_SIGN}))


def _measured(case: str, path: Path, leaves: int, with_orbax: bool) -> dict[str, dict[str, float]]:
    """The command, its output in a pipe; and Orbax's call, where it has one."""
    out, found = whole_process(["-m", "ckptkit.cli", "inspect", str(path)])
    if f"{leaves:,} leaves" not in out or out.count("\n") < leaves:
        raise click.ClickException(f"{path}: {leaves} leaves were to be shown, and it began with {out[:200]!r}")
    samples = {OURS: found}
    if CASES[case] and with_orbax:
        out, whole = whole_process(["-m", "bench.inspect_worker", "metadata", str(path), str(leaves)])
        samples[ORBAX] = {**whole, **json.loads(out.splitlines()[-1])}
    return samples


def orbax_ratio(samples: dict[str, list[dict[str, float]]]) -> float | None:
    """Orbax's call, without its imports, over our whole command: medians; None where Orbax has none."""
    if ORBAX not in samples:
        return None
    return median(each["call_s"] for each in samples[ORBAX]) / median(each["wall_s"] for each in samples[OURS])


def _show(result: dict[str, Any]) -> None:
    table = Table(title=f"metadata of {result['leaves']:,} leaves: the whole command, medians of {result['repeats']}")
    for title in ("case", "command s", "its CPU s", "bar s", "", "Orbax's call s", "ratio", "bar", ""):
        table.add_column(title, justify="left" if title == "case" else "right")
    for case, samples in result["cases"].items():
        took_s = median(each["wall_s"] for each in samples[OURS])
        bar_s, ratio = INSPECT_OCDBT_S if CASES[case] else INSPECT_S, orbax_ratio(samples)
        row = [case, f"{took_s:.2f}", f"{median(each['cpu_s'] for each in samples[OURS]):.2f}", f"{bar_s:g}"]
        row.append("reached" if took_s <= bar_s else "NOT reached")
        if ratio is not None:
            row += [f"{median(each['call_s'] for each in samples[ORBAX]):.2f}", f"{ratio:.1f}", f"{INSPECT_OF_ORBAX:g}"]
            row.append("reached" if ratio >= INSPECT_OF_ORBAX else "NOT reached")
        table.add_row(*row)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
