"""The verified parts as text, and the progress."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptkit.cli.text import count_text, print_line, print_table, printable, size_text
from ckptkit.util import clock
from ckptkit.verification import Scrub, StepProof, Treatment, Verification, VerifyProgress

_COLUMNS = [
    ("step", True),
    ("state", False),
    ("save", False),
    ("cells", True),
    ("bytes", True),
    ("where", False),
    ("why", False),
]
_TREATED = [(title, title == "step") for title in ("step", "save", "copy", "where", "what", "from", "why")]
_EVERY_S = 0.2  # a terminal is written to no more often


def show_verification(found: Verification) -> None:
    """Prints it on stdout."""
    counts = Counter(proof.state for proof in found.steps)
    others = "".join(f", {counts[state]} {state}" for state in ("unproven", "incomplete") if counts[state])
    saves = count_text(len(found.steps), "save")
    what = "" if found.item is None else f"item {found.item}, of no step: "
    print_line(f"{found.path}: {what}{saves}, {counts['proven']} proven, {counts['corrupt']} corrupt{others}")
    for note in found.notes:
        print_line(f"  {note}")
    if found.steps:
        print_line()
        print_table(_COLUMNS, [_row(proof, found.item) for proof in found.steps])


def show_scrub(found: Scrub) -> None:
    """Prints it on stdout."""
    damaged, copies = len(found.treatments), count_text(found.checked, "copy", "copies")
    print_line(f"{found.root}: {copies}, {damaged} damaged{'' if found.repair else ', nothing was changed'}")
    for note in found.notes:
        print_line(f"  {note}")
    if found.treatments:
        print_line()
        print_table(_TREATED, [_treated(each) for each in found.treatments])


@contextmanager
def progress_line() -> Iterator[Callable[[VerifyProgress], None] | None]:
    """A line on stderr that is written over, where stderr is a terminal; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    last_s = 0.0

    def show(progress: VerifyProgress) -> None:
        nonlocal last_s
        now_s = clock.monotonic_s()
        if now_s - last_s < _EVERY_S:
            return
        last_s = now_s
        done, total = size_text(progress.checked_bytes), size_text(progress.total_bytes)
        sys.stderr.write(printable(f"step {progress.step}: {done} of {total}") + "\x1b[K\r")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\x1b[K")
        sys.stderr.flush()


def _row(proof: StepProof, item: str | None) -> list[str]:
    save = "" if proof.save_id is None else str(proof.save_id)
    cells, checked_bytes = proof.checked
    return [
        str(proof.step) if item is None else "-",
        proof.state,
        save,
        str(cells),
        size_text(checked_bytes),
        proof.path,
        proof.reason or "",
    ]


def _treated(each: Treatment) -> list[str]:
    words = {
        "repair": "repaired" if each.done else "can be repaired",
        "quarantine": "put aside" if each.done else "would be put aside",
        "leave": "left",
    }
    sources = ", ".join(f"{name} ({size_text(size)})" for name, size in each.sources.items())
    save = "" if each.save_id is None else str(each.save_id)
    return [str(each.step), save, each.kind, each.path, words[each.act], sources, each.reason or ""]
