"""The map of the code in docs/ARCHITECTURE.md and README.md is that of the tree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ckptkit"
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()


def modules() -> set[str]:
    """The modules and packages that stand in the package itself."""
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return found - {"__init__"}


def layers_of_the_contract() -> list[set[str]]:
    """Top layer first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [set(re.split(r"\s*[|:]\s*", layer.strip())) for layer in layers]


def test_the_layers_are_those_of_the_contract() -> None:
    """Whoever reads the page would put a module where the linter refuses it."""
    (told,) = re.findall(r"held by import-linter:\s`([^`]+)`", PAGE)
    assert [set(re.split(r",\s*", layer.strip())) for layer in told.split("/")] == layers_of_the_contract()


def test_every_module_of_the_package_has_a_layer() -> None:
    """A module that no layer names may import anything, and be imported by anything."""
    assert modules() <= set().union(*layers_of_the_contract())


def test_every_module_of_the_package_is_in_the_tree_of_the_readme() -> None:
    """Whoever looks for what is where would not find it."""
    tree = (ROOT / "README.md").read_text().split("## What is where")[1].split("```")[1]
    named = set(re.findall(r"(\w+)(?:\.py|/)", tree))
    assert modules() <= named, sorted(modules() - named)


def test_every_file_that_the_page_names_is_there() -> None:
    """A reader would look for a module that was renamed."""
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE))
    assert len(named) > 30
    for path in named:
        inside = any(str(found).endswith(f"/{path}") for found in PACKAGE.rglob(Path(path).name))
        assert inside or (ROOT / path).exists(), path


def test_every_name_that_the_page_takes_from_a_module_is_there() -> None:
    """A reader would look for a function that was renamed."""
    of_a_control_group = ("memory", "max")
    for module, name in set(re.findall(r"`(\w+)\.([A-Za-z]\w+)`", PAGE)) - {of_a_control_group}:
        files = [path for path in PACKAGE.rglob(f"{module}.py") if name != "py"]
        assert not files or any(re.search(rf"(def|class) {name}\b", path.read_text()) for path in files), (module, name)
