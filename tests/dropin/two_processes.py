"""One of two processes of a job that uses what only a drop-in has: run by `test_two_processes.py`.

    python -m tests.dropin.two_processes PROCESS PORT DIR

Prints a line for each part that went well, and `done` with the steps that it saw. Every call is made by both processes
together, as with Orbax's manager.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


class Job:
    """Shared by the parts: two devices on each process, managers over roots of their own, and this process's clock."""

    def __init__(self, process: int, root: Path):
        import jax

        from ckptkit.util import clock

        self.process = process
        self.root = root
        self.mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        self.moved_s = 0.0
        clock.monotonic_s = lambda: time.monotonic() + self.moved_s

    def put(self, value: Any, *spec: Any) -> Any:
        """A global array."""
        import jax

        return jax.device_put(value, jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*spec)))

    def state(self, step: int) -> dict[str, Any]:
        import numpy as np

        return {"w": self.put(np.arange(8.0) + step, "x"), "step": step}

    def manager(self, name: str, *, ram: Any = None, saving: Any = None, **options: Any) -> Any:
        """Over the root `name`, with a ramdisk tier if `ram` is given."""
        import orbax.checkpoint as ocp

        import ckptkit

        tiers = [] if ram is None else [ckptkit.Tier.ram(str(self.root / "ram"), **ram)]
        given = ocp.CheckpointManagerOptions(**options)
        host_id = f"h{self.process}"
        return ckptkit.CheckpointManager(
            self.root / name,
            options=given,
            tiers=tiers,
            host_id=host_id,
            processes=ckptkit.ProcessOptions(timeout_s=60),
            saving=saving,
        )

    def save(self, manager: Any, step: int, state: Any = None) -> bool:
        import orbax.checkpoint as ocp

        args: Any = ocp.args
        taken = manager.save(step, args=args.StandardSave(self.state(step) if state is None else state))
        manager.wait_until_finished()
        return taken


def shards(array: Any) -> list[Any]:
    """This process's part of an array."""
    return [shard.data.tolist() for shard in array.addressable_shards]


def items_and_policies(job: Job) -> list[int]:
    """A policy that each process would answer differently, items that Orbax writes, deletion."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers as policies

    args: Any = ocp.args
    answers = iter([True, False, True, True])

    class Whim:
        """A policy that would decide differently on each process."""

        def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
            assert job.process == 0
            return next(answers)

    with job.manager("run", save_decision_policy=policies.AnySavePolicy([Whim()])) as manager:
        taken = [manager.save(step, args=args.StandardSave(job.state(step))) for step in range(4)]
        assert taken == [True, False, True, True], taken
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2, 3]
        manager.delete(2)
        assert manager.all_steps(read=True) == [0, 3]
        assert manager.metadata(3).item_handlers["default"].endswith("StandardCheckpointHandler")
        assert manager.restore(3, args=args.StandardRestore())["step"] == 3
    with job.manager("run", ram={}) as manager:
        # Text under such a name is Orbax's to write: on the caller's thread, between steps of our own.
        for step in range(4, 8):
            given = args.PyTreeSave({**job.state(step), **({"a/b": "text"} if step % 2 else {})})
            assert manager.save(step, args=given)
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 3, 4, 5, 6, 7]
        found = manager.restore(7)
        assert found["a/b"] == "text"
        assert shards(found["w"]) == shards(job.state(7)["w"])
        return manager.all_steps()


def tier_policies(job: Job) -> None:
    """By seconds: process 0's clock decides. By bytes: the largest share decides. Both over a restart."""
    import jax
    import numpy as np

    import ckptkit

    def held(manager: Any) -> list[int]:
        return [record.step for record in manager.steps() if "ram" in record.tiers]

    with job.manager("seconds", ram={"save": ckptkit.EverySeconds(600)}, save_interval_steps=1000) as manager:
        assert job.save(manager, 0)
        job.moved_s += 700.0 * (job.process == 1)
        assert not manager.should_save(1)
        job.moved_s += 700.0 * (job.process == 0)
        assert manager.should_save(1)
        assert job.save(manager, 1)
        assert not job.save(manager, 2)
        assert held(manager) == [0, 1]
    with job.manager("seconds", ram={"save": ckptkit.EverySeconds(600)}, save_interval_steps=1000) as manager:
        manager.restore(None)
        job.moved_s += 700.0 * (job.process == 1)
        assert not manager.should_save(2)
        job.moved_s += 700.0 * (job.process == 0)
        assert manager.should_save(2)

    uneven = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("y",))  # process 0 holds two boxes, process 1 one
    array = jax.device_put(np.arange(3.0), jax.sharding.NamedSharding(uneven, jax.sharding.PartitionSpec("y")))
    for first in (1, 7):
        with job.manager("bytes", ram={"keep": ckptkit.KeepBytes(3 * 8192)}, save_interval_steps=1000) as manager:
            assert held(manager) == ([] if first == 1 else [4, 5, 6])
            for step in range(first, first + 6):
                assert job.save(manager, step, {"w": array})
            assert held(manager) == [first + 3, first + 4, first + 5], held(manager)
    for count in (4, 2):
        with job.manager("count", ram={"keep": ckptkit.KeepNewest(count)}, save_interval_steps=1000) as manager:
            for step in range(10 - count, 20 - count):
                job.save(manager, step)
            assert held(manager) == list(range(20 - 2 * count, 20 - count)), held(manager)
    with job.manager("flushed", ram={"keep": ckptkit.KeepUnflushed(2)}, save_interval_steps=3) as manager:
        for step in range(8):
            assert job.save(manager, step)
        assert held(manager) == [4, 5, 7], held(manager)


def casts(job: Job) -> None:
    """Each process casts its own shards."""
    import jax
    import orbax.checkpoint as ocp

    args: Any = ocp.args
    for name, ram in (("cast", None), ("cast-ram", {})):
        with job.manager(name, ram=ram) as manager:
            job.save(manager, 1)
            for dtype in ("bfloat16", "int32"):
                sharding = job.state(1)["w"].sharding
                wanted = {"w": jax.ShapeDtypeStruct((8,), dtype, sharding=sharding), "step": 0.0}
                found = manager.restore(1, args=args.StandardRestore(wanted))
                assert found["w"].dtype == dtype
                assert shards(found["w"]) == shards(job.state(1)["w"])
                assert found["step"] == 1.0


def newer_style(job: Job) -> None:
    """A run through `v1.Checkpointer` is resumed from the fast tier, and without it."""
    import jax
    from orbax.checkpoint import v1 as orbax

    import ckptkit
    from ckptkit import v1

    every = orbax.training.save_decision_policies.FixedIntervalPolicy(2)

    def make(ram: bool) -> Any:
        tiers = [ckptkit.Tier.ram(str(job.root / "ram"))] if ram else []
        return v1.Checkpointer(
            job.root / "v1",
            save_decision_policy=every,
            tiers=tiers,
            host_id=f"h{job.process}",
            processes=ckptkit.ProcessOptions(timeout_s=60),
        )

    with make(True) as checkpointer:
        for step in range(4):
            assert checkpointer.save(step, job.state(step))
    for ram, expected in ((True, 3), (False, 2)):
        with make(ram) as checkpointer:
            assert checkpointer.latest.step == expected
            template = jax.tree.map(
                lambda leaf: (
                    jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
                    if isinstance(leaf, jax.Array)
                    else leaf
                ),
                job.state(0),
            )
            found = checkpointer.load(abstract_state=template)
            assert found["step"] == expected
            assert shards(found["w"]) == shards(job.state(expected)["w"])
    with make(True) as checkpointer:
        assert checkpointer.load_async().result(timeout=60)["step"] == 3
        assert checkpointer.save(4, job.state(4))
        assert [each.step for each in checkpointer.checkpoints][-2:] == [3, 4]
    with make(True) as checkpointer:  # what MaxText saves: an object that saves itself, and a part of the state
        position = _Position(10 + job.process)
        items = {"items": job.state(6), "iter": position, "config": {"run": "a"}}
        assert checkpointer.save_checkpointables(6, items)
    context = orbax.Context()
    context.pytree.loading.partial_load = True
    with make(True) as checkpointer, context:
        restored = _Position(0)
        part = {"w": jax.ShapeDtypeStruct((8,), job.state(0)["w"].dtype, sharding=job.state(0)["w"].sharding)}
        found = checkpointer.load_checkpointables(6, {"items": part, "iter": restored, "config": None})
        assert restored.at == position.at
        assert shards(found["items"]["w"]) == shards(job.state(6)["w"])
        assert found["config"] == {"run": "a"}


class _Position:
    """A data iterator of one process, which saves itself."""

    def __init__(self, at: int):
        self.at = at

    async def save(self, directory: Any) -> Any:
        """Writes a file of this process."""
        import jax

        async def write() -> None:
            (await directory.await_creation() / f"{jax.process_index()}.txt").write_text(str(self.at))

        return write()

    async def load(self, directory: Any) -> Any:
        """Reads it."""
        import jax

        async def read() -> None:
            self.at = int((directory / f"{jax.process_index()}.txt").read_text())

        return read()


def nnx_state(job: Job) -> None:
    """An optimizer with its moments, and random streams with their counters, come back to the bit on each process."""
    import jax
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx

    import ckptkit

    args: Any = ocp.args

    def everywhere(leaf: Any) -> Any:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = job.put(np.asarray(jax.random.key_data(leaf)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return job.put(np.asarray(leaf), *(["x"] if leaf.ndim == 2 and leaf.shape[0] % 4 == 0 else []))

    def make(seed: int) -> Any:
        rngs = nnx.Rngs(params=seed, dropout=seed + 1)
        model = nnx.Linear(8, 4, rngs=rngs)
        for _ in range(seed):
            rngs.dropout()
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        optimizer.update(model, jax.tree.map(lambda leaf: leaf * seed, nnx.state(model, nnx.Param)))
        states = {"optimizer": nnx.state(optimizer), "model": nnx.state(model), "rngs": nnx.state(rngs)}
        return jax.tree.map(everywhere, states)

    def bits(tree: Any) -> list[Any]:
        leaves = jax.tree.leaves(tree)
        plain = [jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
        return [(str(leaf.dtype), shards(leaf)) for leaf in plain]

    saved, target = make(3), ckptkit.abstract_state(make(5))
    for name, ram in (("nnx", None), ("nnx-ram", {})):
        with job.manager(name, ram=ram) as manager:
            manager.save(1, args=args.StandardSave(saved))
        with job.manager(name, ram=ram) as manager:
            found = manager.restore(None, args=args.StandardRestore(target))
        assert jax.tree.structure(found) == jax.tree.structure(saved)
        assert bits(found) == bits(saved)
        assert bits(found) != bits(make(5))


def overdue(job: Job) -> None:
    """Both processes raise at the same save, by process 0's clock; none by process 1's alone."""
    import ckptkit
    from ckptkit.durable.steps import DurableSteps

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    real, DurableSteps.save = DurableSteps.save, refused
    policy = ckptkit.FailurePolicy(retries=0, max_age_s={"durable": 3600.0})
    saving = ckptkit.SaveOptions(on_failure=policy)
    try:
        with job.manager("overdue", ram={}, saving=saving) as manager:

            def fails(step: int) -> str:
                try:
                    job.save(manager, step)
                except ckptkit.SaveFailedError as error:
                    return str(error)
                return ""

            assert "was not committed to tier durable" in fails(1)
            job.moved_s += 4000.0 * (job.process == 1)
            assert "was not committed to tier durable" in fails(2)
            job.moved_s += 4000.0 * (job.process == 0)
            assert "was not committed to tier durable" in fails(3)
            assert "step 4 is not saved: durable has committed no save" in fails(4)
            DurableSteps.save = real
            assert manager.latest_step() == 3, "the ramdisk has it"
    finally:
        DurableSteps.save = real


def keeping(job: Job) -> None:
    """The steps that a policy keeps, if each process would answer differently, as with a clock."""

    class Whim:
        """Process 0 keeps one step, the other three."""

        def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
            first = len(checkpoints) - (1 if job.process == 0 else 3)
            return [at >= first for at in range(len(checkpoints))]

    for name, ram in (("kept", None), ("kept-ram", {})):
        with job.manager(name, ram=ram, preservation_policy=Whim()) as manager:
            for step in range(4):
                assert job.save(manager, step)
            assert [r.step for r in manager.steps() if "durable" in r.tiers] == [3]


def other_primary(job: Job) -> None:
    """Orbax's books are kept by process 1."""
    import orbax.checkpoint as ocp

    options = ocp.options.MultiprocessingOptions(primary_host=1)
    for name, ram in (("primary", None), ("primary-ram", {})):
        with job.manager(name, ram=ram, multiprocessing_options=options, max_to_keep=2) as manager:
            for step in range(4):
                assert job.save(manager, step)
            assert [r.step for r in manager.steps() if "durable" in r.tiers] == [2, 3]
        with job.manager(name, multiprocessing_options=options) as manager:
            assert manager.all_steps() == [2, 3]
            found = manager.restore(3)
            assert shards(found["w"]) == shards(job.state(3)["w"])


def resuming(job: Job) -> None:
    """The newest step is damaged: both processes count from the one before."""
    import orbax.checkpoint as ocp
    import pytest

    from ckptkit.errors import CorruptCheckpointError

    args: Any = ocp.args
    with job.manager("resumed") as manager:
        for step in range(3):
            assert job.save(manager, step)
    if job.process == 0:
        for data in (job.root / "resumed" / "2" / "default").rglob("d/*"):
            data.write_bytes(b"damaged")
    with job.manager("resumed") as manager:
        template = job.state(0)
        with pytest.raises(CorruptCheckpointError, match="newest first: 1, 0"):
            manager.restore(manager.latest_step(), args=args.StandardRestore(template))
        assert manager.latest_step() == 1
        found = manager.restore(None, args=args.StandardRestore(template))
        assert shards(found["w"]) == shards(job.state(1)["w"])
        assert (manager.latest_step(), manager.all_steps()) == (1, [0, 1])
        assert job.save(manager, manager.latest_step() + 1)
        assert manager.all_steps() == [0, 1, 2]
    with job.manager("resumed") as manager:
        found = manager.restore(manager.latest_step(), args=args.StandardRestore(template))
        assert shards(found["w"]) == shards(job.state(2)["w"])


def last_save(job: Job) -> None:
    """A step that a preemption finds in the ramdisk alone is saved to the durable tier, too."""
    import orbax.checkpoint as ocp

    args: Any = ocp.args
    with job.manager("last", ram={}, save_interval_steps=1000) as manager:
        for step in range(2):
            assert job.save(manager, step)
        assert manager.steps()[-1].tiers == ("ram",)
        last = manager.save_last(1, args.StandardSave(job.state(1)), grace_s=60.0, metrics={"loss": 1.0})
        assert (last.tiers, last.unfinished) == (("ram", "durable"), ()), last
    with job.manager("last") as manager:
        assert manager.all_steps() == [0, 1]
        assert shards(manager.restore(None)["w"]) == shards(job.state(1)["w"])


def certified(job: Job) -> None:
    """Process 0 records which saves a replay came to, and both restore the newest of them."""
    import jax
    import orbax.checkpoint as ocp
    import pytest

    import ckptkit
    from ckptkit import guard

    args: Any = ocp.args

    @jax.jit
    def step_on(state: Any) -> Any:
        return {"w": state["w"] * 0.5 + 1, "step": state["step"] + 1}

    state = {**job.state(0), "step": job.put(0)}
    template = args.StandardRestore(ckptkit.abstract_state(state))
    with job.manager("certified") as manager:
        for step in range(4):
            state = step_on(state)
            spoiled = {**state, "w": state["w"] + (step == 3)}
            assert job.save(manager, step + 1, spoiled)
    with job.manager("certified", read_only=True) as manager:
        with pytest.raises(ckptkit.StepNotFoundError, match="has no certified step"):
            manager.restore(None, args=template, certified=True)
        found = guard.replay(
            manager,
            lambda: lambda state, _: step_on(state),
            lambda step, restored: range(9),
            args=template,
            state_of=lambda restored: restored,
            first=1,
            record=True,
        )
        assert found.difference is not None
        assert (found.difference.step, found.difference.processes) == (4, (0, 1))
    with job.manager("certified") as manager:
        assert int(manager.restore(None, args=template, certified=True)["step"]) == 3


def main(process: int, port: str, root: Path) -> None:
    import jax

    import ckptkit

    ckptkit.log_to("INFO", stream=sys.stdout)
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    job = Job(process, root)
    parts = (tier_policies, casts, newer_style, nnx_state, overdue, keeping, other_primary, resuming, last_save)
    for part in (*parts, certified):
        part(job)
        print("went well:", part.__name__, flush=True)
    print("done", items_and_policies(job), flush=True)
    os._exit(0)  # the service's own shutdown barrier is not what is tested


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
