"""The wheel: what is in it, and that it works with the core dependencies alone."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import ckptkit
from tools.release import ReleaseError, build, call, check, readme_loop
from tools.requirements import floors, requirements

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("core_only.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist, built from a copy: a build leaves files next to its sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("ckptkit", "trainer", "tools", "bench", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return build(copy, out)


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path]) -> Path:
    return built[0]


@pytest.mark.long
def test_sdist_has_the_sources_of_the_wheel(built: tuple[Path, Path]) -> None:
    """A package manager that builds from source would install another library, or one without its license."""
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "ckptkit/py.typed"} <= names
    assert {name for name in zipfile.ZipFile(built[0]).namelist() if name.endswith(".py")} <= names


@pytest.mark.long
def test_wheel_contains_only_the_library(wheel: Path) -> None:
    """`pip install` would put packages named tests, tools and trainer into people's environments; or drop the types."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ckptkit", "ckptkit_jax"}
    assert "ckptkit/py.typed" in names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ckptkit").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without its dependencies: those are this environment's."""
    target = tmp_path_factory.mktemp("installed")
    call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel, cwd=target)
    return target


@pytest.mark.long
def test_library_imports_only_its_core_dependencies(installed: Path, tmp_path: Path) -> None:
    """An import of what only an extra brings would break everybody who did not ask for it."""
    said = call(sys.executable, SCRIPT, tmp_path / "work", "--block", cwd=tmp_path, PYTHONPATH=str(installed))
    assert f"CORE ONLY: {installed}" in said


@pytest.mark.long
def test_readme_loop_ends_right_after_a_flipped_bit(installed: Path, tmp_path: Path) -> None:
    """The loop went back to the older step, counted on from the newer one, and ended with a wrong number."""
    code = readme_loop(ROOT, tmp_path)
    call(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    for name in ("ram", "ssd"):  # another host, with the durable root alone
        shutil.rmtree(tmp_path / name)
    data = max((tmp_path / "run" / "100").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    longer = code.replace("101", "121") + "\nprint('w is', float(state['w'].min()), float(state['w'].max()))"
    assert "w is 120.0 120.0" in call(sys.executable, "-c", longer, cwd=tmp_path, PYTHONPATH=str(installed))


@pytest.mark.long
def test_import_block_refuses_undeclared_packages(installed: Path, tmp_path: Path) -> None:
    """The test above would pass whatever the library imports."""
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); from core_only import block\n"
        "block()\n"
        "import fsspec, xxhash\n"
        "for name in ('pytest', 'flax', 'gcsfs'):\n"
        "    try: __import__(name)\n"
        "    except ModuleNotFoundError: continue\n"
        "    raise SystemExit(name)\n"
    )
    call(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed))


def test_extras_and_version_match_the_documents() -> None:
    """`pip install ckptkit-jax[s3]` would warn and install nothing; a release would have no entry in the changelog."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"gcs", "s3", "torch", "test", "bench", "docs"} <= set(project["optional-dependencies"])
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == ckptkit.__version__


def test_readme_without_its_loop_is_not_released(tmp_path: Path) -> None:
    """A release would be called checked, and its first example would not have run."""
    assert "CheckpointManager" in readme_loop(ROOT, tmp_path)
    (tmp_path / "README.md").write_text("```python\nimport ckptkit\n```\n")
    with pytest.raises(ReleaseError, match=r"README.md has no loop with the directories /dev/shm/ckptkit"):
        readme_loop(tmp_path, tmp_path)


@pytest.mark.slow
def test_fresh_environment_needs_no_other_package(wheel: Path) -> None:
    """The same from the registry, as a person installs it: `make campaign NAME=wheel`."""
    check(sys.executable, wheel, ROOT)


def test_requirements_of_extras_are_those_of_the_extras_that_they_name() -> None:
    """An environment of CI would lack a package, and the tests that need it would be skipped."""
    text = (ROOT / "pyproject.toml").read_text()
    found = requirements(text, ["test"])
    assert any(line.startswith("jax>=") for line in found)
    assert any(line.startswith("matplotlib>=") for line in found), "test names plot"
    assert any(line.startswith("hypothesis==") for line in found), "test names test-core"
    assert not any(line.startswith("ckptkit") for line in found)
    with pytest.raises(KeyError):
        requirements(text, ["no-such-extra"])


def test_floor_versions_match_the_requirements() -> None:
    """`make campaign NAME=floor` would test other versions than those that are promised."""
    found = floors((ROOT / "pyproject.toml").read_text())
    assert "jax==0.10" in found
    assert "orbax-checkpoint==0.12.8" in found
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(found) == len(project["dependencies"]) + len(project["optional-dependencies"]["trainer"])
