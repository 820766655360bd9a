"""A restart is the program that was started: each program of the corpus prints the same with a template and without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, WarmStart, Workers
from ckptkit.launch.first_imports import FirstImports
from tests.launch.imports.corpus import Program, programs

PROGRAMS = {program.name: program for program in programs()}
SHORT = frozenset((
    "draws_numpy-after", "draws_numpy_global-after", "seeds_numpy-after", "draws_random-before", "reads_rank-after",
    "script-sets-last",
))  # fmt: skip
_POLICY = RestartPolicy(restarts=1, backoff_s=0.0, grace_s=60.0)


def lines_of(program: Program, home: Path, *, is_cold: bool) -> tuple[list[str], list[str]]:
    """The lines of two processes in two attempts, and those of them that differ from process to process by design."""
    lines: list[tuple[int, str]] = []
    words = [sys.executable, *program.words, "{attempt}", "--steps", "5"]
    workers = Workers(
        words,
        processes=2,
        env={"FLAVOUR": "sweet", "JAX_PLATFORMS": "cpu"},
        warm=WarmStart(is_cold=is_cold),
    )
    hooks = Hooks(on_output=lambda process, line: lines.append((process, line)), say=lambda line: None)
    # A worker ends as soon as another one is lost: both end well, and the second attempt is a launch of its own.
    for attempt in (1, 2):
        assert Launcher(workers, first_attempt=attempt, policy=_POLICY, hooks=hooks).run() == ExitCode.OK, lines
    drawn = [line for _, line in lines if line.startswith("DRAWN")]
    return sorted(f"{process} {line}" for process, line in lines if not line.startswith("DRAWN")), drawn


def check(program: Program, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in program.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(code)
    monkeypatch.chdir(home)
    (cold, cold_drawn), (warm, warm_drawn) = (lines_of(program, home, is_cold=is_cold) for is_cold in (True, False))
    assert warm == cold
    assert len(set(warm_drawn)) == len(set(cold_drawn)), "a template drew for its workers"


@pytest.mark.parametrize("name", sorted(SHORT))
def test_programs_print_the_same_warm_and_cold(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart would train with another precision, other code, or the same random numbers on all processes."""
    check(PROGRAMS[name], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - SHORT))
def test_all_programs_print_the_same_warm_and_cold(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for every program of the corpus."""
    check(PROGRAMS[name], tmp_path, monkeypatch)


def test_editable_install_is_a_library_too(tmp_path: Path) -> None:
    """A contributor's jobs would restart cold: no entry of `sys.path` has a package that is installed so."""
    script = tmp_path / "s.py"
    script.write_text("import os, ckptkit, jax\n")
    path = [str(tmp_path), *(each for each in sys.path if not (Path(each) / "ckptkit").is_dir())]
    assert FirstImports("script", str(script), path).statements == ["import ckptkit", "import jax"]
    patched = FirstImports("module", "ckptkit.patch", path).statements
    assert "import ckptkit.patch" in patched, "python -m ckptkit.patch"
    (tmp_path / "ckptkit.py").write_text("")
    assert FirstImports("script", str(script), path).statements == []
