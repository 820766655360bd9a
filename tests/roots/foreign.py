"""Roots with what is not of their run: files of other tools and of people, other checkpoints, links, odd names."""

from __future__ import annotations

import json
from typing import Final

from tests.roots.tree import ROOT, StrangeRoot, Tree, registered

FOREIGN: Final[dict[str, StrangeRoot]] = {}
_DISK = {"on_bucket": False}
OURS, STOCK = "ckptkit composite", "orbax composite"


@registered(FOREIGN)
def other_prefixes(tree: Tree) -> None:
    """A base model `gemma_3` and a user's copy `best_250` in the root of a run of ckptkit."""
    tree.run(OURS)
    tree.step("orbax direct", 3, f"{ROOT}/gemma_3")
    tree.step(OURS, 2, f"{ROOT}/best_250")


@registered(FOREIGN)
def other_prefixes_beside_stock(tree: Tree) -> None:
    """The same in a root of stock Orbax."""
    tree.run(STOCK)
    tree.step("orbax direct", 3, f"{ROOT}/gemma_3")
    tree.step(STOCK, 2, f"{ROOT}/best_250")


@registered(FOREIGN, **_DISK)
def backup_by_hard_links(tree: Tree) -> None:
    """A user has a copy of each step by hard links next to the root: every file of the run is also the user's."""
    tree.run("ckptkit unchanged leaf")
    for step in (1, 2, 3):
        tree.backup(f"{ROOT}/{step}", f"backup/{step}")


@registered(FOREIGN, **_DISK)
def backup_of_a_damaged_step_by_hard_links(tree: Tree) -> None:
    """The same, and a bit is changed in a file that two steps and their copies have in common."""
    backup_by_hard_links(tree)
    tree.damage(f"{ROOT}/3", "default/d/unchanged.*", "bit flip")


@registered(FOREIGN)
def two_runs_by_prefix(tree: Tree) -> None:
    """Two runs of stock Orbax in one directory: one with plain numbers, one with the prefix `step_`."""
    tree.run(STOCK)
    tree.run("orbax step prefix", of_run=False)
    tree.subject = f"{ROOT}/3"


@registered(FOREIGN)
def directory_of_runs(tree: Tree) -> None:
    """An experiment: `0` and `1` are roots of their own, `2024` holds a text."""
    tree.run(OURS, (1, 2), f"{ROOT}/0", of_run=False)
    tree.run(STOCK, (1, 2), f"{ROOT}/1", of_run=False)
    tree.put(f"{ROOT}/2024/notes.txt")


@registered(FOREIGN)
def directory_of_stock_runs(tree: Tree) -> None:
    """Roots of stock Orbax with decimal names, side by side."""
    for name in ("0", "1", "7"):
        tree.run(STOCK, (1, 2), f"{ROOT}/{name}", of_run=False)


@registered(FOREIGN)
def decimal_directories(tree: Tree) -> None:
    """A root with directories whose names are numbers and that hold no save."""
    tree.run(OURS)
    tree.put(f"{ROOT}/2024/notes.txt")
    tree.put(f"{ROOT}/9999/figures/loss.csv", "1,2\n")
    tree.put(f"{ROOT}/5/metadata.txt")


@registered(FOREIGN)
def decimal_directories_beside_stock(tree: Tree) -> None:
    """The same in a root of stock Orbax."""
    tree.run(STOCK)
    tree.put(f"{ROOT}/2024/notes.txt")
    tree.put(f"{ROOT}/9999/figures/loss.csv", "1,2\n")


@registered(FOREIGN)
def nested_root(tree: Tree) -> None:
    """A run with another root below it, in a directory whose name is not a number."""
    tree.run(OURS)
    tree.run(OURS, (1, 2), f"{ROOT}/evaluation/run_1", of_run=False)


@registered(FOREIGN)
def files_of_other_tools(tree: Tree) -> None:
    """A run with the files of experiment trackers, notebooks and file systems in its root."""
    tree.run(OURS)
    for path in (
        "wandb/run-20240101_120000-a1b2/files/config.yaml",
        "wandb/latest-run/logs/debug.log",
        "tensorboard/events.out.tfevents.1700000000.host.1.0",
        ".ipynb_checkpoints/train-checkpoint.py",
        "mlruns/0/meta.yaml",
        "config.json",
        "README.md",
        ".git/HEAD",
        "__pycache__/train.cpython-311.pyc",
        "checkpoint-500/pytorch_model.bin",
    ):
        tree.put(f"{ROOT}/{path}")
    (tree.root / "lost+found").mkdir()


@registered(FOREIGN)
def files_of_other_tools_beside_stock(tree: Tree) -> None:
    """A few of them in a root of stock Orbax."""
    tree.run(STOCK)
    for path in (
        "wandb/latest-run/logs/debug.log",
        "tensorboard/events.out.tfevents.1.h.1.0",
        "checkpoint-500/model.bin",
    ):
        tree.put(f"{ROOT}/{path}")
    (tree.root / "lost+found").mkdir()


@registered(FOREIGN)
def files_alone(tree: Tree) -> None:
    """A directory of a user's that holds no checkpoint at all."""
    for path in ("train.py", "data/part-0.txt", "12/notes.txt", "step_7/notes.txt", "wandb/latest-run/log"):
        tree.put(f"{ROOT}/{path}")


@registered(FOREIGN)
def files_in_a_step(tree: Tree) -> None:
    """Notes of a user in step directories, of ckptkit's."""
    tree.run(OURS)
    tree.put(f"{ROOT}/3/notes.txt")
    tree.put(f"{ROOT}/3/evaluation/accuracy.json", "{}")


@registered(FOREIGN)
def files_in_a_stock_step(tree: Tree) -> None:
    """Notes of a user in a step directory of stock Orbax."""
    tree.run(STOCK)
    tree.put(f"{ROOT}/3/notes.txt")
    tree.put(f"{ROOT}/3/evaluation/accuracy.json", "{}")


@registered(FOREIGN)
def other_formats(tree: Tree) -> None:
    """Checkpoints of other formats in the root of a run: a header of safetensors, a directory of Hugging Face's."""
    tree.run(OURS)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tree.root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    tree.put(f"{ROOT}/hf_7/config.json", "{}")
    tree.put(f"{ROOT}/export-3/model.safetensors.index.json", "{}")


@registered(FOREIGN)
def foreign_step_of_ours(tree: Tree) -> None:
    """A step of another run of ckptkit, of a later epoch, that somebody copied into the root with `cp -r`."""
    tree.run(OURS)
    tree.copied_step("restarted", 50, f"{ROOT}/50")


@registered(FOREIGN)
def converted_item(tree: Tree) -> None:
    """An item without a step around it, as `convert --to orbax ROOT/3000` wrote it, in a run's root."""
    tree.run(OURS)
    tree.step("orbax direct", 3, f"{ROOT}/3000")


@registered(FOREIGN, **_DISK)
def link_to_a_step(tree: Tree) -> None:
    """`best_300` is a link to the only step."""
    tree.run(STOCK, (3,))
    tree.link(f"{ROOT}/best_300", "3")


@registered(FOREIGN, **_DISK)
def decimal_link_to_a_step(tree: Tree) -> None:
    """`9` is a link to the only step of ckptkit."""
    tree.run(OURS, (3,))
    tree.link(f"{ROOT}/9", "3")


@registered(FOREIGN, **_DISK)
def link_to_latest(tree: Tree) -> None:
    """`latest` and `step_3` are links to steps of a run."""
    tree.run(OURS)
    tree.link(f"{ROOT}/latest", "3")
    tree.link(f"{ROOT}/step_3", "3")
    tree.link(f"{ROOT}/4", "2")


@registered(FOREIGN, **_DISK)
def link_out_of_the_root(tree: Tree) -> None:
    """A step that was moved to another disk, with a link in its place."""
    tree.run(OURS)
    tree.move(f"{ROOT}/1", "archive/1")
    tree.fact("archive/1", of_run=False)
    tree.link(f"{ROOT}/1", "../archive/1")


@registered(FOREIGN, **_DISK)
def stock_link_out_of_the_root(tree: Tree) -> None:
    """The same in a root of stock Orbax, with the newest step."""
    tree.run(STOCK)
    tree.move(f"{ROOT}/3", "archive/3")
    tree.fact("archive/3", of_run=False)
    tree.link(f"{ROOT}/3", "../archive/3")
    tree.subject = f"{ROOT}/2"


@registered(FOREIGN, **_DISK)
def dangling_and_looping_links(tree: Tree) -> None:
    """Links to nothing, to themselves and to the root."""
    tree.run(OURS)
    tree.link(f"{ROOT}/8", "nowhere")
    tree.link(f"{ROOT}/9", "9")
    tree.link(f"{ROOT}/here", ".")
    tree.link(f"{ROOT}/10", ".")


@registered(FOREIGN, **_DISK)
def link_to_a_directory_of_files(tree: Tree) -> None:
    """Links with names of steps that lead to a user's files."""
    tree.run(OURS)
    tree.put("home/thesis.txt")
    tree.link(f"{ROOT}/12", "../home")
    tree.link(f"{ROOT}/step_12", "../home")


@registered(FOREIGN, **_DISK)
def root_is_a_link(tree: Tree) -> None:
    """The root itself is a link to where the run is."""
    tree.run(OURS, at="disk/run")
    tree.root.rmdir()
    tree.link(ROOT, "disk/run")


@registered(FOREIGN, **_DISK)
def link_inside_a_step(tree: Tree) -> None:
    """A directory of an item with a handler of its own is a link to a place outside."""
    tree.run("orbax custom handler")
    tree.move_files(f"{ROOT}/3/story", "outside/story")
    tree.link(f"{ROOT}/3/story", "../../outside/story")


@registered(FOREIGN, **_DISK)
def names_with_line_ends(tree: Tree) -> None:
    """Directories and files whose names hold a line end, a terminal command and a tab."""
    tree.run(OURS)
    for name in ("new\nline_7", "red\x1b[31m_8", "tab\t9", "-rf", "--help"):
        tree.put(f"{ROOT}/{name}/notes.txt")
    tree.step(STOCK, 2, f"{ROOT}/saved\nby_me_2")


@registered(FOREIGN)
def names_with_spaces(tree: Tree) -> None:
    """Directories whose names hold spaces, letters beyond ASCII, and digits that are not ASCII."""
    tree.run(OURS)
    for name in ("my best 7", "größte_5", "实验_9", "١٢٣", "%41#?_6", "１２"):  # noqa: RUF001  digits of other scripts
        tree.put(f"{ROOT}/{name}/notes.txt")
    tree.step(STOCK, 2, f"{ROOT}/my best_2")


@registered(FOREIGN)
def numbers_written_twice(tree: Tree) -> None:
    """`3`, `03` and `003` are three saves of one step: those with zeros before the number are not of the run."""
    tree.run(STOCK)
    for name in ("03", "003"):
        tree.step(STOCK, 3, f"{ROOT}/{name}")


@registered(FOREIGN)
def files_with_names_of_steps(tree: Tree) -> None:
    """Files at the top of a root whose names are those of steps."""
    tree.run(OURS)
    tree.put(f"{ROOT}/7")
    tree.put(f"{ROOT}/step_8")
    tree.put(f"{ROOT}/commit_success.txt")


@registered(FOREIGN, **_DISK)
def unreadable_names(tree: Tree) -> None:
    """A directory in the root whose name is not UTF-8."""
    tree.run(OURS)
    (tree.root / "caf\udce9_7").mkdir()
    (tree.root / "caf\udce9_7" / "notes.txt").write_text("words of a user\n")
