"""The example of every command's help runs as it is printed, and shells complete the commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

import ckptkit
from ckptkit.cli import main
from tests.cli.test_certify import make_root
from tools.cli_docs import named_commands
from tools.session import save_steps

CODES = {"diff": 20}  # the others end with 0


def example_of(command: click.Command) -> str:
    with click.Context(command, help_option_names=["-h", "--help"]) as context:  # click caches the first
        (found,) = re.findall(r"^ +ckptkit (.+)$", command.get_help(context).split("Example:")[1], re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a run, its tier and its events, and with what the examples name."""
    made = tmp_path_factory.mktemp("examples")
    events = ckptkit.EventLog.for_run(made / "run" / "events")
    tiers = [ckptkit.Tier.ram(str(made / "ckpt"), save=ckptkit.EverySteps(100))]
    save_steps(made / "run", tiers=tiers, events=events, host_id=None)
    events.close()
    (made / "new").mkdir()
    for name in ("encoder", "head"):
        np.savez(made / f"{name}.npz", allow_pickle=False, **{name: np.ones(3)})
    (made / "train.py").write_text("from tests.cli.test_certify import plan as replay\n")
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(("name", "command"), [pytest.param(*each, id=each[0]) for each in named_commands()])
def test_example_in_the_help_of_every_command_runs(
    name: str, command: click.Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that a reader copies first would end with an error."""
    words = shlex.split(example_of(command).replace("/dev/shm/ckpt", str(home / "ckpt")))
    assert " ".join(words[: len(name.split())]) == name
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # of `run`'s processes
    if name == "certify":  # its run is one that the plan in train.py can replay
        make_root(tmp_path)
        (tmp_path / "train.py").write_text((home / "train.py").read_text())
        monkeypatch.chdir(tmp_path)
    if name == "sign":
        pytest.importorskip("model_signing", reason="ckptkit-jax[sign] is not installed")
        subprocess.run(
            ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "private.pem"], check=True
        )
    if name == "unpin":
        assert main(["pin", "run", "100"]) == 0
    assert main(words) == CODES.get(name, 0)


_COMPLETE = {
    "bash": """
        eval "$(_CKPTKIT_COMPLETE=bash_source ckptkit)"
        COMP_WORDS=({words}); COMP_CWORD={last}; _ckptkit_completion ckptkit; echo "${{COMPREPLY[@]}}"
    """,
    "zsh": """
        autoload -U compinit; compinit -u -D; eval "$(_CKPTKIT_COMPLETE=zsh_source ckptkit)"
        _describe() {{ print -- $completions_with_descriptions }}; compadd() {{ print -- $completions }}
        words=({words}); CURRENT=$(({last} + 1)); _ckptkit_completion
    """,
}


@pytest.mark.parametrize("shell", _COMPLETE)
def test_shells_complete_commands_and_options(shell: str) -> None:
    """The line of docs/CLI.md for ~/.bashrc and ~/.zshrc would complete nothing, or print an error at each Tab."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: make setup-system")
    root = Path(__file__).parents[2]
    assert f"_CKPTKIT_COMPLETE={shell}_source" in (root / "docs" / "CLI.md").read_text()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for words, expected in (("ckptkit st", "steps"), ("ckptkit steps --js", "--json")):
        code = _COMPLETE[shell].format(words=words, last=len(words.split()) - 1)
        done = subprocess.run(
            [shell, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(root)},
        )
        assert (done.returncode, done.stderr) == (0, ""), (words, done.stderr)
        assert expected in done.stdout, (words, done.stdout)


def test_completion_of_a_command_imports_none() -> None:
    """Each Tab would take seconds: click looks every command up."""
    code = "import sys; from ckptkit.cli import main; main([]); sys.stderr.write(str('jax' in sys.modules))"
    words = {"_CKPTKIT_COMPLETE": "bash_complete", "COMP_WORDS": "ckptkit ve", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **words})
    assert done.stdout == "plain,verify\n"
    assert "True" not in done.stderr
