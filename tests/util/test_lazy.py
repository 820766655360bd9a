"""Names that are imported when they are asked for: all there, and nothing imported before."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("ckptkit", *(f"ckptkit.{name}" for name in ("formats", "goodput", "inspection", "store", "upkeep")))
FUNCTIONS = ("save",)  # although there is a package of that name


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checker_names_match_runtime_names(package: str) -> None:
    """A public name would be there for an editor and not at run time, or the reverse, or be a module of that name."""
    module = importlib.import_module(package)
    source = Path(str(module.__file__))
    (block,) = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.If)]
    said = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert sorted(said) == module.__all__
    assert set(said) <= set(dir(module))
    for name, home in said.items():
        is_module = home == package
        there = any(path.exists() for path in (source.with_name(f"{name}.py"), source.with_name(name)))
        assert there == is_module or name in FUNCTIONS, name
        found = importlib.import_module(f"{package}.{name}" if is_module else str(home))
        assert getattr(module, name) is (found if is_module else getattr(found, name)), name


def test_missing_name_raises_attribute_error() -> None:
    """A typing error would be an internal error, and `hasattr` would not work."""
    with pytest.raises(AttributeError, match="module 'ckptkit' has no attribute 'nonsense'"):
        getattr(importlib.import_module("ckptkit"), "nonsense")  # noqa: B009  a type checker would report it


@pytest.mark.parametrize("module", ["ckptkit", "ckptkit.cli.inspect"])
def test_metadata_modules_do_not_import_jax(module: str) -> None:
    """Looking at metadata would take two seconds of imports."""
    code = f"import sys, {module}; print(sorted({{'jax', 'orbax.checkpoint', 'gcsfs'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")
