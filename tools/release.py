"""Builds a release and checks it: `make release`, or `python -m tools.release --into dist`. Uploads and tags nothing.

It refuses a tree with changes that are not committed, a version whose section of CHANGELOG.md is missing, empty or
"(unreleased)", files in changes/ that no section has, and a version whose tag exists. Then it builds wheel and sdist
from the commit alone.
It checks each in a fresh environment of every Python from 3.11 to 3.14 that this machine has: dependencies from the
registry, the README's loop, a save, a restore, the command line and a conversion. A Python that is missing is named.

Exit codes: 0 built and checked; 1 refused, or a check failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from tools.changes import change_files

ROOT = Path(__file__).parents[1]
MINORS = (11, 12, 13, 14)
_SCRIPT = "tests/packaging/core_only.py"
_CHECK_S = 1800


class ReleaseError(Exception):
    """The release is refused, or a part of it fails its check; the message has the reason and the remedy."""


def call(*words: object, cwd: Path, **environ: str) -> str:
    """The output of a command, without this process's PYTHONPATH. Raises `ReleaseError` with its last lines."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env={**env, **environ}, capture_output=True, text=True, timeout=_CHECK_S)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def version_of(root: Path) -> str:
    """The version in the sources."""
    found = re.search(r'^__version__ = "([^"]+)"', (root / "ckptkit" / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise ReleaseError("ckptkit/__init__.py has no __version__")
    return found[1]


def refusals(root: Path) -> list[str]:
    """Why the tree cannot be released; empty if it can."""
    version, found = version_of(root), []
    if changed := call("git", "status", "--porcelain", cwd=root).splitlines():
        found.append(f"{len(changed)} files are changed or new, the first is {changed[0][3:]}: commit or remove them")
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    own = next((section for section in sections if section.split()[0] == version), None)
    if own is None:
        found.append(f"CHANGELOG.md has no section {version}: write what changed for users")
    elif not own.partition("\n")[2].strip():
        found.append(f"CHANGELOG.md has nothing below {version}: write what changed for users")
    elif "(unreleased)" in own.partition("\n")[0]:
        found.append(f"CHANGELOG.md calls {version} unreleased: write the date instead")
    if waiting := change_files(root):
        found.append(
            f"changes/ has {len(waiting)} files that are in no section: python -m tools.changes {version} DATE"
        )
    if call("git", "tag", "--list", f"v{version}", cwd=root):
        found.append(f"the tag v{version} exists: raise __version__ in ckptkit/__init__.py")
    return found


def build(source: Path, into: Path) -> tuple[Path, Path]:
    """Wheel and sdist of the sources in `source`, where a build leaves files. setuptools is this environment's."""
    call(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        into,
        ".",
        cwd=source,
    )
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    call(sys.executable, "-c", code, into, cwd=source)
    (wheel,), (sdist,) = into.glob("ckptkit_jax-*.whl"), into.glob("ckptkit_jax-*.tar.gz")
    return wheel, sdist


def pythons() -> Iterator[tuple[str, str | None]]:
    """Each Python that the release supports, as `3.12`, and where it is; None where this machine does not have it."""
    for minor in MINORS:
        version = f"3.{minor}"
        versions = Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")
        found = [shutil.which(f"python{version}"), *map(str, sorted(versions)), sys.executable]
        yield version, next((python for python in found if python and _is(python, version)), None)


def _is(python: str, version: str) -> bool:
    """Whether it starts, and has that version: a shim may do neither."""
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.strip() == version


def readme_loop(root: Path, home: Path) -> str:
    """The loop of the README in the sources `root`, with its tiers and its run below `home`. Raises `ReleaseError`."""
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    places = {"/dev/shm/ckptkit": "ram", "/tmp/ckptkit-ssd": "ssd", "/tmp/ckptkit-run": "run"}
    for code in blocks:
        if all(f'"{place}"' in code for place in places):
            for place, name in places.items():
                code = code.replace(f'"{place}"', repr(str(home / name)))
            return code
    raise ReleaseError(f"README.md has no loop with the directories {', '.join(places)}")


def check(python: str, built: Path, source: Path) -> None:
    """Installs a wheel or an sdist of `source` into a fresh environment, and works with it. Raises `ReleaseError`."""
    with tempfile.TemporaryDirectory(prefix="ckptkit-release-") as made:
        home = Path(made)
        call(python, "-m", "venv", home / "venv", cwd=home)
        command = home / "venv" / "bin"
        call(command / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", built, cwd=home)
        said = call(command / "python", source / _SCRIPT, home / "work", cwd=home)
        if f"CORE ONLY: {home / 'venv'}" not in said:
            raise ReleaseError(f"{built.name} on {python}: not the installed library was tested, but {said}")
        call(command / "python", "-c", readme_loop(source, home), cwd=home, JAX_PLATFORMS="cpu")
        call(command / "ckptkit", "inspect", home / "run" / "100", cwd=home)
        call(command / "ckptkit", "convert", home / "run" / "100", home / "model.npz", cwd=home)
        code = "import sys, numpy; assert {w.min() for w in numpy.load(sys.argv[1]).values()} == {100}"
        call(command / "python", "-c", code, home / "model.npz", cwd=home)


def release(root: Path, into: Path) -> None:
    """Builds and checks; `into` then has the two files. Raises `ReleaseError`."""
    if found := refusals(root):
        raise ReleaseError("\n".join(["this tree is not released:", *(f"- {each}" for each in found)]))
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckptkit-release-") as made:
        source = Path(made) / "source"
        call("git", "archive", "--output", f"{made}/source.tar", "HEAD", cwd=root)
        with tarfile.open(f"{made}/source.tar") as archive:
            archive.extractall(source, filter="data")
        built = build(source, Path(made))
        for version, python in pythons():
            for each in built:
                if python is not None:
                    check(python, each, source)
                click.echo(
                    f"python{version}: {each.name} {'works' if python else 'is NOT CHECKED, no such Python is here'}"
                )
        for each in built:
            shutil.copy(each, into)
            click.echo(into / each.name)
    click.echo(f"to publish: git tag v{version_of(root)}, push the tag, upload the two files")


@click.command()
@click.option("--into", type=click.Path(file_okay=False, path_type=Path), default=Path("dist"), show_default=True)
def main(into: Path) -> None:
    """Builds wheel and sdist of the commit, and checks both on every Python that is here."""
    try:
        release(ROOT, into.resolve())
    except ReleaseError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
