"""The distribution is `ckptkit-jax`: another project is called `ckptkit` on the package index."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ckptkit
from ckptkit.util.package import NAME, install_command, refuse_foreign

ROOT = Path(__file__).parents[2]
FOREIGN_INSTALL = re.compile(r"""pip3? install(?: +[^\s`]+)*? +['"]?ckptkit(?![-\w.])""")


def installed(site: Path, name: str, record: str) -> None:
    info = site / f"{name}-0.1.3.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(record)


def test_no_text_installs_the_foreign_distribution() -> None:
    """A reader would install another project, and `import ckptkit` would import it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".sbatch", ".sh"}
    paths = [ROOT / name for name in listed if Path(name).suffix in kinds or Path(name).name == "Makefile"]
    assert len(paths) > 500
    found = [path for path in paths if path.exists() and FOREIGN_INSTALL.search(path.read_text(errors="replace"))]
    assert found == []


@pytest.mark.parametrize("wrong", ["ckptkit", "'ckptkit[s3]'", "-U ckptkit", '"ckptkit>=0.2"'])
def test_the_pattern_finds_the_foreign_distribution(wrong: str) -> None:
    """The test above would pass whatever the pages tell."""
    assert FOREIGN_INSTALL.search(f"pip install {wrong}")
    assert not FOREIGN_INSTALL.search(f"pip install {wrong.replace('ckptkit', NAME)}")


def test_foreign_distribution_is_named_at_import(tmp_path: Path) -> None:
    """Modules of two projects would be mixed in one directory, and fail far from the cause."""
    installed(tmp_path, "ckptkit", "ckptkit/__init__.py,,\nckptkit-0.1.3.dist-info/METADATA,,\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import ckptkit"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"ImportError: the distribution ckptkit 0.1.3 in {tmp_path} is another project")
    assert line.endswith("pip uninstall ckptkit, then pip install --force-reinstall --no-deps ckptkit-jax")


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("ckptkit_jax", "ckptkit/__init__.py,,\n"),
        ("ckptkit", "__editable__.ckptkit-0.1.3.pth,,\n"),
        ("ckptkit_tools", "ckptkit/__init__.py,,\n"),
    ],
    ids=["this one", "an editable install", "a longer name"],
)
def test_other_distributions_are_not_refused(name: str, record: str, tmp_path: Path) -> None:
    """The package could not be imported from its own wheel."""
    installed(tmp_path, name, record)
    refuse_foreign([str(tmp_path), str(tmp_path / "absent"), __file__])


def test_project_has_this_name_and_version() -> None:
    """The error would send a person to a distribution that does not exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == NAME
    assert re.fullmatch(r"\d+\.\d+\.\d+", ckptkit.__version__)
    assert install_command("s3") == "pip install 'ckptkit-jax[s3]'"
