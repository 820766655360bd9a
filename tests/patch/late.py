"""A process in which Orbax's classes are in use before `patch_orbax`; prints `done` at its end."""

import sys
import tempfile
from types import ModuleType
from typing import Any

import orbax.checkpoint as ocp

import ckptkit
from ckptkit.patch import patch_orbax


def refusal() -> str:
    """The text of the error of `patch_orbax`; empty if it raises none."""
    try:
        patch_orbax()
    except ckptkit.CheckpointError as error:
        return str(error)
    return ""


def main() -> None:
    """Each use is refused by name, and nothing is replaced; without them all is."""
    stock = ocp.CheckpointManager
    trainer: Any = ModuleType("trainer_of_mine")
    trainer.Manager = stock
    sys.modules["trainer_of_mine"] = trainer
    manager = stock(tempfile.mkdtemp())
    subclass = type("MyCheckpointer", (ocp.StandardCheckpointer,), {"__module__": "trainer_of_mine"})
    found = refusal()
    for expected in (
        "module trainer_of_mine has imported orbax.checkpoint.checkpoint_manager.CheckpointManager as Manager",
        "1 instances of orbax.checkpoint.checkpoint_manager.CheckpointManager exist",
        "trainer_of_mine.MyCheckpointer is a subclass of",
        "python -m ckptkit.patch -- SCRIPT",
    ):
        assert expected in found, found
    assert ocp.CheckpointManager is stock, "half a patch"
    manager.close()
    del manager, subclass, trainer.Manager
    code = (
        "import functools\n"
        "managers = {'orbax': stock}\n"
        "kinds = (stock,)\n"
        "class Config:\n    manager = stock\n    def make(self, cls=stock): return cls\n"
        "def make(path, *, cls=stock): return cls(path)\n"
        "prepared = functools.partial(stock, 'root')\n"
    )
    trainer.stock = stock
    exec(code, vars(trainer))
    del trainer.stock
    found = refusal()
    for expected in (
        "module trainer_of_mine has orbax.checkpoint.checkpoint_manager.CheckpointManager in managers['orbax']",
        "CheckpointManager as Config.manager",
        "module trainer_of_mine: Config.make has orbax",
        "module trainer_of_mine: make has orbax",
        "module trainer_of_mine: prepared has orbax",
    ):
        assert expected in found, found
    assert "kinds" not in found, "isinstance is right with our classes too"
    vars(trainer).clear()
    trainer.kinds = (stock,)
    import gc

    gc.collect()
    assert refusal() == ""
    assert ocp.CheckpointManager is not stock
    assert "was called before" in refusal()
    standard = ocp.StandardCheckpointer()
    assert isinstance(standard, ocp.AsyncCheckpointer)
    assert isinstance(standard, ocp.Checkpointer)
    assert isinstance(ocp.PyTreeCheckpointer(), ocp.Checkpointer)
    assert not isinstance(ocp.PyTreeCheckpointer(), ocp.AsyncCheckpointer)
    print("done")


if __name__ == "__main__":
    main()
