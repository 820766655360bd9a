"""Statistics of leaves as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from ckptkit.cli.text import print_line, print_table
from ckptkit.conversion import Statistics, statistics_of
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats import open_checkpoint
from ckptkit.inspection import Inspection

_COLUMNS = [(title, title != "leaf") for title in ("leaf", "min", "max", "mean", "std", "norm", "nan", "inf")]

Known = Mapping[tuple[str, str], Statistics]


def statistics(
    found: Inspection, memory_bytes: int, timeout_s: float, progress: Callable[[int, int], None] | None
) -> tuple[Known, list[str]]:
    """Those of the leaves of an inspection, by item and name, and what of them is damaged; PRNG keys have none."""
    wanted = [(item.name, leaf.name) for item in found.items for leaf in item.leaves]
    known, problems, done = dict[tuple[str, str], Statistics](), list[str](), 0
    with ExitStack() as files:
        try:
            opened = files.enter_context(open_checkpoint(found.path, timeout_s=timeout_s))
        except CorruptCheckpointError as error:  # what its metadata shows is still printed
            return known, [str(error)]
        tensors = {(tensor.item, tensor.name): tensor for tensor in opened.tensors if tensor.leaf.key_impl is None}
        chosen = [key for key in wanted if key in tensors]
        total = sum(tensors[key].nbytes for key in chosen)
        for key in chosen:
            try:
                known[key] = statistics_of(tensors[key], memory_bytes)
            except CorruptCheckpointError as error:  # the others still have rows to show
                problems.append(str(error))
            done += tensors[key].nbytes
            if progress is not None:
                progress(done, total)
    return known, problems


def show_statistics(known: Known) -> None:
    """Prints them on stdout."""
    print_line()
    print_table(_COLUMNS, [[f"{item}:{name}", *_cells(each)] for (item, name), each in known.items()])


def stats_json(known: Known) -> list[dict[str, Any]]:
    """As `--json` prints them."""
    return [{"item": item, "name": name, **asdict(each)} for (item, name), each in known.items()]


def _cells(each: Statistics) -> list[str]:
    numbers = (each.minimum, each.maximum, each.mean, each.std, each.norm)
    return ["" if number is None else f"{number:.4g}" for number in numbers] + [str(each.nan), str(each.inf)]
