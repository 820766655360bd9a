"""The shape that keeps objects graspable: constructors of at most 8 arguments, records of at most 8 fields.

A larger one is composed of objects that travel together.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ckptkit"
ARGUMENTS_MAX = FIELDS_MAX = 8

LONG_CONSTRUCTORS = {
    "CheckpointManager",  # Orbax's eight arguments, and ours
    "Checkpointer",  # those of Orbax's v1 checkpointer
}

# Public and documented: users write or read every field of these by name.
LONG_RECORDS = {
    "Tier",  # made by Tier.ram, Tier.ssd and Tier.peer
    "SaveOptions",  # each is a word of the caller's, and none belongs to another
    "DurableProfile",  # a file that `ckptkit tune` writes
    "ArenaEntry",  # a row of `ckptkit tiers --json`
    "StepUsage",  # a row of `ckptkit du --json`
    "GoodputReport",  # `ckptkit goodput --json`
    "StepProof",  # a step of `ckptkit verify --json`
    "Scrub",  # `ckptkit scrub --json`
    "Result",  # a row of `ckptkit simulate --json`
    # Not public:
    "Save",  # gains its fields as it advances, in the order of the flow: one object in place of a chain of records
    "Restore",  # the same, of a restore
    "Restored",  # what a restore leaves for its caller, its run and its log line
}


@cache
def classes() -> tuple[ast.ClassDef, ...]:
    """Every class of the package, nested ones too."""
    modules = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    return tuple(node for module in modules for node in ast.walk(module) if isinstance(node, ast.ClassDef))


def arguments_of(each: ast.ClassDef) -> list[str]:
    """The named arguments of a constructor that is written down, without self."""
    for node in each.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = node.args
            return [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)][1:]
    return []


def fields_of(each: ast.ClassDef) -> list[str]:
    """The fields of a dataclass, or of a typed tuple."""
    words = [ast.unparse(node) for node in (*each.decorator_list, *each.bases)]
    if not any("dataclass" in word or "NamedTuple" in word for word in words):
        return []
    annotated = [node for node in each.body if isinstance(node, ast.AnnAssign)]
    return [ast.unparse(node.target) for node in annotated if "ClassVar" not in ast.unparse(node.annotation)]


def test_constructors_take_at_most_eight_arguments() -> None:
    """The needs of a class would be unknown, and each new service would be threaded through one by one."""
    long = {each.name: arguments_of(each) for each in classes() if len(arguments_of(each)) > ARGUMENTS_MAX}
    assert set(long) <= LONG_CONSTRUCTORS, long


def test_records_have_at_most_eight_fields() -> None:
    """Fields that belong together would be carried, checked and forgotten one by one."""
    long = {each.name: fields_of(each) for each in classes() if len(fields_of(each)) > FIELDS_MAX}
    assert set(long) <= LONG_RECORDS, long


def test_the_look_finds_what_is_long() -> None:
    """The two tests above would pass for a package without any class."""
    found = {each.name: max(len(arguments_of(each)), len(fields_of(each))) for each in classes()}
    assert found["CheckpointManager"] > ARGUMENTS_MAX
    assert found["DurableProfile"] > FIELDS_MAX
