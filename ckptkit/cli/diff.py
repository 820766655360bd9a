"""`ckptkit diff`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ckptkit.cli.exits import Exit
from ckptkit.cli.options import JSON, MAP, MEMORY, TIMEOUT
from ckptkit.cli.progress import reading_bar
from ckptkit.cli.sources import leased_sources
from ckptkit.cli.text import count_text, print_json, print_line, print_table
from ckptkit.conversion import Difference, mapped, no_arrays, read_rules
from ckptkit.conversion import diff as diff_tensors
from ckptkit.formats import open_checkpoint

_COLUMNS = [(title, title != "leaf") for title in ("leaf", "changed", "max abs", "max rel", "ulp", "cosine")]


@click.command()
@click.argument("a")
@click.argument("b")
@MAP
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Tolerated: |a - b| <= atol + rtol x |b|.")
@click.option(
    "--atol", type=click.FloatRange(min=0), default=0.0, help="See --rtol. Without both, only equal bits pass."
)
@JSON
@MEMORY
@TIMEOUT
def diff(
    a: str, b: str, map_path: str | None, rtol: float, atol: float, as_json: bool, memory_bytes: int, timeout_s: float
) -> int:
    """Say how the checkpoints A and B differ: leaves, shapes and dtypes, then values. Any two formats.

    The rules of --map are applied to A. Exit code 20 where they differ by more than the tolerances.
    """
    rules = [] if map_path is None else read_rules(map_path)
    with (
        open_checkpoint(a, timeout_s=timeout_s) as one,
        open_checkpoint(b, timeout_s=timeout_s) as two,
        leased_sources([*one.sources, *two.sources], timeout_s),
    ):
        tensors = mapped(one.by_name(), rules), two.by_name()
        with reading_bar() as progress:
            found = diff_tensors(*tensors, rtol=rtol, atol=atol, memory_bytes=memory_bytes, progress=progress)
        notes = [f"not compared: {each}" for each in dict.fromkeys([*no_arrays(one), *no_arrays(two)])]
    if as_json:
        print_json({**found.to_json(), "notes": notes})
    else:
        _show(found, notes)
    return Exit.OK if found.same else Exit.DIFFERENT


def _show(found: Difference, notes: Sequence[str]) -> None:
    close = sum(leaf.close for leaf in found.values)
    counts = [
        count_text(found.equal, "leaf is the same", "leaves are the same"),
        count_text(len(found.values) - close, "differs in its values", "differ in their values"),
    ]
    print_line(", ".join(counts) + f", {close} within the tolerances" * (close > 0))
    for note in notes:
        print_line(f"  {note}")
    for title, names in (("only in A", found.only_a), ("only in B", found.only_b)):
        for name in names:
            print_line(f"  {title}: {name}")
    for name, one, two in found.shapes:
        print_line(f"  {name} is {one} in A, {two} in B")
    if found.values:
        print_line()
        rows = [
            [
                leaf.name,
                f"{100 * leaf.changed:.3g} %",
                f"{leaf.max_abs:.3g}",
                f"{leaf.max_rel:.3g}",
                "" if leaf.ulp is None else str(leaf.ulp),
                "" if leaf.cosine is None else f"{leaf.cosine:.8f}",
            ]
            for leaf in found.values
        ]
        print_table(_COLUMNS, rows)
