"""The Makefile: its targets, its campaigns, and an environment that runs this checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS_MAX = 15
CALLED = re.compile(r"(?:`|: |\(|^start \w+ |^)make ([a-z][\w-]+)(?=[`)\"]|$| [A-Z]+=| +#)", re.MULTILINE)
CAMPAIGN = re.compile(r"make campaign NAME=([\w-]+)")


def make(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "NAME")}
    return subprocess.run(["make", *words], cwd=cwd, env={**environ, **variables}, capture_output=True, text=True)


def targets() -> set[str]:
    return set(re.findall(r"^  make ([\w-]+)", make("help").stdout, re.MULTILINE))


def campaigns() -> set[str]:
    return set(CAMPAIGN.findall(make("campaign").stdout))


def test_help_lists_every_target_by_group() -> None:
    """A newcomer would read 45 targets, or not find the one that CI runs."""
    (phony,) = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets() | {"help"} == set(phony.split())
    assert len(targets()) <= TARGETS_MAX
    assert len(re.findall(r"^\w", make("help").stdout, re.MULTILINE)) > 1, "groups"


def test_campaign_runs_by_its_name_and_no_other_target_does() -> None:
    """`NAME=clean` would remove the environments, and a typing error would end with make's own words."""
    shown = make("--dry-run", "campaign", "NAME=kill", "KILLS=5").stdout
    assert "-m bench kill --processes 4 --kills 5" in shown
    for name in ("clean", "zoos", "k"):
        refused = make("campaign", f"NAME={name}")
        assert f"{name} is not a campaign: make campaign lists them" in refused.stderr
        assert refused.returncode


def test_every_target_that_is_named_exists() -> None:
    """A page, a message or CI would send a person to a target that is no more."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".mk", ""}
    existing, listed_campaigns, wrong = targets() | {"help"}, campaigns(), []
    for path in (ROOT / name for name in listed if Path(name).suffix in kinds and "golden" not in name):
        if path.suffix == "" and path.name not in ("run", "Makefile"):
            continue
        text = path.read_text(errors="replace") if path.exists() else ""
        wrong += [(path.name, name) for name in CALLED.findall(text) if name not in existing]
        wrong += [(path.name, name) for name in CAMPAIGN.findall(text) if name not in listed_campaigns]
    assert wrong == []


@pytest.mark.long
def test_setup_links_the_checkout_again_after_pip_install(tmp_path: Path) -> None:
    """Commands and tests would run the copy that `pip install .` left, and no edit would change anything."""
    for name in ("Makefile", "tools/linked.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "ckptkit").mkdir()
    (tmp_path / "ckptkit" / "__init__.py").write_text('"""Another library."""\n')
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "ckptkit-jax"\nversion = "0.1"\n[tool.setuptools]\npackages = ["ckptkit"]\n'
    )
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    borrowed = [path for path in reversed(sys.path) if path.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    (venv / ".ready").touch()
    python = str(venv / "bin" / "python")

    def imported() -> Path:
        code = "import ckptkit; print(ckptkit.__file__)"
        done = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, check=True)
        return Path(done.stdout.strip()).parent

    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([python, "-m", "pip", "install", *offline, "."], cwd=tmp_path, check=True, capture_output=True)
    assert imported() == site / "ckptkit"
    done = make("setup", cwd=tmp_path, PIP_NO_BUILD_ISOLATION="0", PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    assert imported() == tmp_path / "ckptkit"
