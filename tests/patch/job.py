"""A job that knows Orbax alone; `test_patch.py` runs it as `python -m ckptkit.patch -- job.py ROOT`."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import v1
from orbax.checkpoint.checkpoint_manager import CheckpointManager
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency


def main(root: str) -> None:
    """Saves and restores through each of Orbax's classes; prints what they were."""
    args: Any = ocp.args
    with CheckpointManager(f"{root}/v0") as manager:
        assert isinstance(manager, ocp.CheckpointManager)
        manager.save(3, args=args.StandardSave({"w": jnp.arange(4.0)}))
        manager.wait_until_finished()
        tiers = [list(record.tiers) for record in getattr(manager, "steps", list)()]
        assert manager.restore(3)["w"].tolist() == [0, 1, 2, 3]
    with v1.training.Checkpointer(f"{root}/v1") as checkpointer:
        assert isinstance(checkpointer, v1.training.Checkpointer)
        checkpointer.save(1, {"w": jnp.ones(3)})
        assert checkpointer.load(1)["w"].tolist() == [1, 1, 1]
    mesh = jax.make_mesh((1,), ("data",))
    with emergency.CheckpointManager(f"{root}/local", f"{root}/persistent", mesh, {"w": jnp.zeros(3)}) as manager:
        manager.save(0, args=args.Composite(state=args.PyTreeSave({"w": jnp.ones(3)})))
        manager.wait_until_finished()
        assert manager.restore(None).state["w"].tolist() == [1, 1, 1]
    with ocp.StandardCheckpointer() as direct:
        direct.save(f"{root}/tree", {"w": jnp.ones(3)})
        direct.wait_until_finished()
    classes = [CheckpointManager, v1.training.Checkpointer, emergency.CheckpointManager, ocp.StandardCheckpointer]
    print(json.dumps({"classes": [each.__module__ for each in classes], "tiers": tiers, "argv": sys.argv}))


if __name__ == "__main__":
    main(sys.argv[1])
