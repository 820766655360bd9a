"""Every function that makes, opens, renames or removes a file by a path, and where the names in that path come from.

A name that came out of a file, a listing or a record is data. It is checked where it enters, by the function that is
named here; a function that is not in the table may not touch a file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import ckptkit

HOME: Final = Path(ckptkit.__file__).parent
AROUND: Final = ("launch/", "testing/", "diagnosis/simulation/")  # they read no checkpoint

# Where the names below the directory come from, and the functions.
SOURCES: Final = {
    "the caller": """
        cli/__init__.main cli/command.run conversion/destination._digest_of_file events.EventLog.__init__
        events.EventLog._open_next formats/ranges._LocalRanges.__init__ model/durable_profile.DurableProfile.save
        store/local.make_directory store/local.sync_directory store/local.sync_tree store/mounts.mount_of
        store/mounts.measured_rate_bytes_s util/disk_file.open_slot util/disk_file.DiskFile.__init__
        util/disk_file.FileReads.__init__ util/disk_file.FileWrites.__init__ util/whole_file.write_whole
        util/package._installs_the_package resume/programs._entry store/local.remove_empty
        store/local.remove_unfinished_puts
    """,
    "ckptkit: a constant, a number or a random id": """
        diagnosis/tuner/probing.Probe._place durable/commit.DiskAttempt.begin durable/commit.DiskAttempt._commit
        durable/commit.DiskAttempt.give_up durable/write_part.PartWriter._write_arrays durable/write_part.sync
        resume/programs._Proof._compare resume/programs._load_same resume/programs._read slots/directory.keep_to_owner
        slots/directory._taken slots/files.SlotFiles.remove store/quarantine.arena_lock store/quarantine._locked
        upkeep/signatures.TrustedKey.require conversion/destination.Destination.commit
        durable/cells/unchanged._link durable/lifecycle/delete.move_away upkeep/pruning._removed
        upkeep/copying._Copying._commit upkeep/copying._Copying._remove upkeep/copying._drop_leftovers
        durable/orbax/file_items._directory durable/lifecycle/places.Place._has_aggregate
    """,
    "a listing: the store leaves out names that cannot be keys": """
        durable/abandoned.clean_unmarked durable/abandoned.empty_leaving manager/fast_tiers.own_host_dirs
        resume/programs._forget_oldest slots/directory.remove_directory slots/directory.remove_slots
        slots/directory.remove_unfinished store/quarantine.move_aside
        upkeep/arenas._emptied upkeep/arenas._is_live durable/orbax/file_items._read verification/mending._remove
        verification/mending._copy verification/mending._link upkeep/copying._Copying._run_on_disk
        upkeep/copying._write
    """,
    "a key that the store checks: model/paths.checked_key": """
        store/local.LocalStore.put store/local.LocalStore._put_new store/local.LocalStore._write_new
        store/local.LocalStore.move store/local.LocalStore.delete durable/read_step.DurableReader._of_file
    """,
    "a record of files: model/manifest_checks.check_small_item": """
        durable/orbax/file_items.read_by verification/mending._mend_file verification/mending._rename_over
        verification/mending._make_way
    """,
    "a manifest of a slot: slots/reader.read_manifest": """
        slots/reader.opened_slot slots/reader._mapped peers/share_index._read
    """,
    "a plan of files: conversion/flat_files, whose names are numbered": """
        conversion/destination.Destination.file conversion/destination.Destination.clear
        conversion/destination.Destination._remove_part
    """,
}
_CALLS: Final = {
    "os": {
        "open",
        "rename",
        "replace",
        "link",
        "symlink",
        "unlink",
        "remove",
        "rmdir",
        "mkdir",
        "makedirs",
        "truncate",
    },
    "shutil": {"rmtree", "move", "copy", "copy2", "copyfile", "copytree"},
}
_METHODS: Final = {
    "write_bytes",
    "write_text",
    "unlink",
    "rmdir",
    "mkdir",
    "rename",
    "symlink_to",
    "hardlink_to",
    "touch",
}


def _touches(call: ast.Call) -> bool:
    match call.func:
        case ast.Name("open"):
            return True
        case ast.Attribute(ast.Name(module), name) if module in _CALLS:
            return name in _CALLS[module]
        case ast.Attribute(_, "replace"):  # of a path; a text takes two arguments, a record named ones
            return len(call.args) == 1 and not call.keywords and not _is_copy(call)
        case ast.Attribute(_, name):
            return name in _METHODS
        case _:
            return False


def _is_copy(call: ast.Call) -> bool:
    """`dataclasses.replace(record, ...)`."""
    return (
        isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id in ("dataclasses", "copy"))
    )


def _functions(node: ast.AST, name: str) -> Iterator[str]:
    """The functions below a node that touch a file by its path."""
    for child in ast.iter_child_nodes(node):
        inner = isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        below = f"{name}.{child.name}" if inner else name  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(child, ast.Call) and _touches(child):
            yield below
        yield from _functions(child, below)


def test_every_function_that_touches_a_file_says_where_its_names_come_from() -> None:
    """A new one could build a path from a name that nobody has checked."""
    found = {
        name
        for path in HOME.rglob("*.py")
        if not (module := path.relative_to(HOME).with_suffix("").as_posix()).startswith(AROUND)
        for name in _functions(ast.parse(path.read_text()), module)
    }
    listed = [name for names in SOURCES.values() for name in names.split()]
    assert sorted(found - set(listed)) == [], "add them to the table, by the source of their names"
    assert sorted(set(listed) - found) == [], "it touches no file any more"
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    "words", ["open(path)", "os.unlink(path)", "path.mkdir()", "shutil.rmtree(path)", "a.replace(b)"]
)
def test_every_way_to_touch_a_file_is_seen(words: str) -> None:
    """The walk could pass over a way that functions take."""
    assert list(_functions(ast.parse(f"def f():\n    if x:\n        {words}"), "m")) == ["m.f"]
