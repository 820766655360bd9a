"""A handler whose processes write files of their own, and the first one a file for all."""

from __future__ import annotations

import os
from typing import Any

import jax
import orbax.checkpoint as ocp


class NotesHandler(ocp.CheckpointHandler):
    """Each process writes `of/<process>`; process 0 writes `all` too. All that is there is given back."""

    def save(self, directory: Any, args: Any) -> None:
        process = jax.process_index()
        if args.text == "raise":
            raise RuntimeError("the handler raised")
        (directory / "of").mkdir(exist_ok=True)
        (directory / "of" / str(process)).write_text(f"{args.text}, process {process}")
        if args.text == "link":
            os.symlink("of", directory / "more")
        if process == 0:
            (directory / "all").write_text(args.text)

    def restore(self, directory: Any, args: Any = None) -> dict[str, str]:
        files = [*directory.glob("of/*"), directory / "all"]
        return {path.name: path.read_text() for path in sorted(files)}


class _Notes(ocp.args.CheckpointArgs):
    def __init__(self, text: str = ""):
        self.text = text


@ocp.args.register_with_handler(NotesHandler, for_save=True)
class NotesSave(_Notes):
    pass


@ocp.args.register_with_handler(NotesHandler, for_restore=True)
class NotesRestore(_Notes):
    pass
