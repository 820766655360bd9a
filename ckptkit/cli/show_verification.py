"""The verified parts as text, and the progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptkit.cli.progress import reading_bar
from ckptkit.cli.text import count_text, print_line, print_table, size_text
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
    """Shows on stderr which step is read and how far, where stderr is a terminal; None elsewhere."""
    with reading_bar() as update:
        yield update and (lambda at: update(at.checked_bytes, at.total_bytes, f"step {at.step}"))


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
