"""A program that starts cold names the statement because of which it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptkit.cli import main
from ckptkit.launch.first_imports import FirstImports

SETS = "import os\nos.environ['A'] = '1'\n"
LIBRARY = "site-packages/strange/__init__.py"
# The files of a program, and the reason.
REASONS = {
    "variable": ({"s.py": f"{SETS}import jax"}, "s.py line 2 sets os.environ['A'] before it imports jax"),
    "call": (
        {"s.py": "import os\nos.environ.setdefault('A', '1')\nif True:\n    from jax import numpy"},
        "s.py line 2 calls os.environ.setdefault('A', '1') before it imports jax",
    ),
    "long": (
        {"s.py": f"import sys\nsys.path.extend(['{'x' * 90}'])\nimport numpy"},
        f"s.py line 2 calls sys.path.extend(['{'x' * 33}... before it imports numpy",
    ),
    "block": (
        {"s.py": "try:\n    import jax\nexcept ImportError:\n    jax = None"},
        "s.py line 1 has `try: import jax except ImportError: jax = None` before it imports jax",
    ),
    "value": (
        {"s.py": "import os\nA = os.getpid()\nimport jax"},
        "s.py line 2 has `A = os.getpid()` before it imports jax",
    ),
    "decorator": (
        {"s.py": "def deco(f):\n    return f\n@deco\ndef g():\n    import jax\n"},
        "s.py line 4 defines g with @deco before it imports jax",
    ),
    "module": (
        {"mine.py": SETS, "s.py": "import mine\nimport jax"},
        "mine.py line 2 sets os.environ['A'] before s.py line 2 imports jax",
    ),
    "star": (
        {"mine.py": "X = 1\n", "s.py": "from mine import *\nY = 1\nimport jax"},
        "s.py line 2 has `Y = 1` after the import of mine.* before it imports jax",
    ),
    "package": (
        {LIBRARY: "import strange.deep\n", "site-packages/strange/deep.py": SETS, "s.py": "import strange, jax\n"},
        "s.py line 1 imports strange, which is not a library that a template may hold, before it imports jax",
    ),
    "package-alone": (
        {LIBRARY: SETS, "s.py": "import json\nimport strange\n"},
        "s.py imports no library before line 2, which imports strange, which is not a library that a template may hold",
    ),
    "main": (
        {"s.py": "def main():\n    pass\nif __name__ == '__main__':\n    main()\n"},
        "s.py imports no library before line 3, which has `if __name__ == '__main__': main()`",
    ),
    "nothing": ({"s.py": "import json\n"}, "s.py imports no library that a template may hold"),
    "missing": (
        {"s.py": "import nowhere, jax\n"},
        "s.py line 1 imports nowhere, which is not in a folder of sys.path, before it imports jax",
    ),
    "shadowed": (
        {"click.py": "", "s.py": "import click, jax\n"},
        "s.py line 1 imports click, which is not installed as a package, before it imports jax",
    ),
    "standard": (
        {"colorsys.py": "", "s.py": "import colorsys\nimport jax\n"},
        "s.py line 1 imports colorsys, which is a file of the program, before it imports jax",
    ),
    "attribute": (
        {"pkg/__init__.py": "mine = 1\n", "pkg/mine.py": "", "s.py": "from pkg import mine\nimport jax\n"},
        "s.py line 1 imports mine of pkg, which may have an attribute of that name, before it imports jax",
    ),
    "mistake": (
        {"s.py": "import json\nx = = 1\n"},
        "s.py cannot be followed (SyntaxError: invalid syntax (s.py, line 2))",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_cold_program_names_the_line_and_what_it_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user would know that restarts are slow, and not which line to change."""
    files, reason = REASONS[name]
    for path, code in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    monkeypatch.syspath_prepend(str(tmp_path))
    first = FirstImports("script", "s.py")
    assert first.reason == reason
    assert first.statements == []


def test_reason_of_a_template_that_ends_early_is_the_line_at_which_it_ends(tmp_path: Path) -> None:
    """`--dry-run` could not show why JAX is not in the template."""
    script = tmp_path / "s.py"
    script.write_text(f"import numpy\n{SETS}import jax\n")
    first = FirstImports("script", str(script))
    assert first.statements == ["import numpy"]
    assert first.reason == f"{script} line 3 sets os.environ['A'] before it imports jax"
    script.write_text("import numpy\nfrom jax import jit\n")
    assert FirstImports("script", str(script)).reason == ""


@pytest.mark.parametrize(
    ("code", "start"),
    [
        (f"{SETS}import jax\n", "cold (s.py line 2 sets os.environ['A'] before it imports jax)"),
        (
            f"import jax\n{SETS}import strange\n",
            "warm (script s.py; the template ends where s.py line 3 sets os.environ['A'])",
        ),
        ("import jax\n", "warm (script s.py)"),
    ],
)  # fmt: skip
def test_dry_run_shows_where_the_template_ends(
    code: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A user would have to start the job to learn how its restarts will be."""
    (tmp_path / "s.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--dry-run", "--", sys.executable, "s.py"]) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == f"1 process on this host, attempt 0: {sys.executable} s.py"
    assert second == f"start: {start}"


def test_command_whose_module_is_missing_is_named_by_the_command(tmp_path: Path) -> None:
    """The line would begin in the middle of a sentence."""
    first = FirstImports("module", "nowhere.at", [str(tmp_path)])
    assert first.reason == "the command imports nowhere, which is not in a folder of sys.path"
