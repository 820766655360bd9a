"""The map of the code in docs/ARCHITECTURE.md is that of the tree, in the contract's order."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ckptkit"
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
TREE = PAGE.split("## Layers")[1].split("```")[1]
ROOMS_MAX = 32
WEIGHT_SHARE_MAX = 0.15


def rooms() -> set[str]:
    """The modules and packages at the root of the package."""
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return found - {"__init__", "__main__"}  # the latter: `test_module_of_the_command_is_the_command`


def layers_of_the_contract() -> list[list[str]]:
    """Top layer first. A module without a folder (`events`, `errors`) counts for the layer above it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    found: list[list[str]] = []
    for rooms_of in (layer.split(" | ") for layer in layers):
        if all((PACKAGE / f"{room}.py").exists() for room in rooms_of):
            found[-1] += rooms_of
        else:
            found.append(rooms_of)
    return found


def test_tree_has_the_rings_of_the_contract_in_order() -> None:
    """A newcomer would put a module where the linter refuses it."""
    tree: dict[str, list[str]] = {}
    for line in TREE.splitlines():
        if match := re.match(r"(around|workbench|core)$", line):
            tree[match[1]] = []
        elif match := re.match(r"     ([\w.]+)", line):
            list(tree.values())[-1].append(match[1].removesuffix(".py"))
    layers = layers_of_the_contract()
    rings = (layers[: layers.index(["cli"])], layers[layers.index(["cli"]) : layers.index(["manager"])])
    core = layers[layers.index(["manager"]) :]
    assert list(tree.values()) == [[room for layer in ring for room in layer] for ring in (*rings, core)]


def test_import_contract_lists_every_package_without_exceptions() -> None:
    """A room without a layer may import anything, and be imported by anything."""
    assert rooms() == {room for layer in layers_of_the_contract() for room in layer}
    assert len(list(PACKAGE.glob("[!_]*"))) + 1 <= ROOMS_MAX


def test_every_package_has_a_docstring() -> None:
    """A stranger opens a folder and reads nothing."""
    for path in PACKAGE.rglob("__init__.py"):
        assert path.read_text().startswith('"""'), path


def test_files_named_on_the_page_exist() -> None:
    """A reader would look for a module that was renamed."""
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", PAGE))
    assert len(named) > 30
    for path in named:
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path


@pytest.mark.parametrize("what", ["save", "restore"])
def test_steps_on_the_page_are_those_of_the_code(what: str) -> None:
    """A reader who follows the page through `SaveFlow.save` or `RestoreFlow.restore` would lose the thread."""
    tree = ast.parse((PACKAGE / what / "flow.py").read_text())
    (flow,) = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == what]
    calls = [each.func for each in ast.walk(flow) if isinstance(each, ast.Call)]
    called = sorted((each.lineno, each.attr) for each in calls if isinstance(each, ast.Attribute))
    section = PAGE.split(f"## A {what}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. \*\*.*(?:\n   .*)*", section, re.MULTILINE)
    functions = {name for _, name in called} - {"failed", "count", "pop"}  # a report, a number, and a field
    named = [name for step in steps for name in re.findall(r"`(\w+)`", step) if name in functions]
    assert len(steps) > 8
    assert named == [name for _, name in called if name in functions]
    assert (flow.end_lineno or 0) - flow.lineno < 60


def test_files_named_anywhere_exist() -> None:
    """A page, a docstring or a comment would send its reader to a module that was moved."""
    pages = [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "tools" / "campaigns.mk", *(ROOT / "docs").rglob("*.md")]
    code = [path for part in ("ckptkit", "trainer", "tools", "tests") for path in (ROOT / part).rglob("*.py")]
    for path in [*pages, *code]:
        for name in re.findall(r"\b(?:ckptkit|tests|tools|trainer)/[\w/]+\.(?:py|toml|json)\b", path.read_text()):
            assert (ROOT / name).exists(), (path.relative_to(ROOT), name)
    for path in pages:
        for name in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", path.read_text()):
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), (path.relative_to(ROOT), name)


def test_functions_named_on_the_page_are_in_their_files() -> None:
    """A reader would look for a function that was renamed, or that another module has."""
    found = re.findall(r"((?:`[\w.]+`(?:, | and )?)+)(?:,[^`|.;]*)? (?:in|\() ?`([\w/]+\.py)`", PAGE)
    named = [(name, path) for names, path in found for name in re.findall(r"`([\w.]+)`", names)]
    assert len(named) > 10
    for name, path in named:
        text = (PACKAGE / path).read_text()
        for part in name.split("."):
            assert re.search(rf"\b(?:def|class) {part}\b|^{part}\b.* = ", text, re.MULTILINE), (name, path)


def test_weights_are_those_of_the_packages() -> None:
    """The page would defend a size that a package no longer has, or leave a package out."""
    stated = {
        name: int(lines.replace(",", "")) for name, lines in re.findall(r"^\| `(\w+)/` \| ([\d,]+) \|", PAGE, re.M)
    }
    found = {
        folder.parent.name: sum(len(path.read_text().splitlines()) for path in folder.parent.rglob("*.py"))
        for folder in PACKAGE.glob("*/__init__.py")
    }
    assert stated.keys() == found.keys()
    wrong = {name: lines for name, lines in found.items() if abs(stated[name] - lines) > WEIGHT_SHARE_MAX * lines}
    assert not wrong, wrong
