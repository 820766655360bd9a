"""Our manager and stock Orbax's side by side: the same random legal calls, the same answers.

The differences are those of `docs/departures.md`: nothing here rolls back, fails, or asks for a cast.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

import ckptkit

args: Any = ocp.args
Options = ocp.CheckpointManagerOptions


def _loss(metrics: Any) -> float:
    return metrics["loss"]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "interval": {"save_interval_steps": 3},
    "keep two": {"max_to_keep": 2},
    "keep two and every fourth": {"max_to_keep": 2, "keep_period": 4},
    "keep none": {"max_to_keep": 0},
    "best": {"best_fn": _loss, "best_mode": "min", "max_to_keep": 2},
    "best, all with metrics": {"best_fn": _loss, "max_to_keep": 2, "keep_checkpoints_without_metrics": False},
    "metrics not written": {"best_fn": _loss, "prevent_write_metrics": True},
    "on steps": {"save_interval_steps": 5, "save_on_steps": [2, 3]},
    "a function": {"should_save_fn": lambda step, last: last is None or step - last >= 2},
    "policies": {
        "save_decision_policy": policies.AnySavePolicy([policies.FixedIntervalPolicy(4), policies.InitialSavePolicy()]),
        "preservation_policy": policies.preservation_policy.LatestN(2),
    },
    "prefix": {"step_prefix": "ckpt", "step_format_fixed_length": 4},
    "synchronous": {"enable_async_checkpointing": False},
    "renamed when deleted": {"max_to_keep": 1, "todelete_subdir": "trash"},
    "read only": {"read_only": True},
}


def tree(seed: int) -> dict[str, Any]:
    """A small state with the nodes that are easily lost."""
    return {"w": jax.numpy.arange(4.0) + seed, "n": {"b": np.arange(3) + seed, "none": None}, "empty": {}, "i": seed}


def outcome(call: Any) -> Any:
    """The result of a call, in a form that can be compared: Orbax's class for an error (ours may be a subclass)."""
    try:
        return plain(call())
    except Exception as error:
        for kind in (StepAlreadyExistsError, FileNotFoundError, KeyError, ValueError):
            if isinstance(error, kind):
                return kind.__name__
        raise


def plain(value: Any) -> Any:
    """A value with its types and bits, without paths and times."""
    if isinstance(value, ocp.args.Composite):
        return {name: plain(each) for name, each in value.items()}
    leaves, structure = jax.tree_util.tree_flatten(value)
    return str(structure), [
        (type(leaf).__name__, str(np.asarray(leaf).dtype), np.asarray(leaf).tolist()) for leaf in leaves
    ]


def with_newest(options: dict[str, Any]) -> dict[str, Any]:
    """The options that make Orbax keep the newest step in addition to the best ones, as ours does: a departure."""
    if "best_fn" not in options or "max_to_keep" not in options:
        return options
    rest = {
        name: value
        for name, value in options.items()
        if name not in ("max_to_keep", "keep_checkpoints_without_metrics")
    }
    best = policies.preservation_policy.BestN(
        get_metric_fn=options["best_fn"],
        reverse=options.get("best_mode") == "min",
        n=options["max_to_keep"],
        keep_checkpoints_without_metrics=options.get("keep_checkpoints_without_metrics", True),
    )
    newest = policies.preservation_policy.LatestN(1)
    return {**rest, "preservation_policy": policies.preservation_policy.AnyPreservationPolicy([best, newest])}


class SideBySide(RuleBasedStateMachine):
    """Every rule calls both managers and compares; every invariant asks both."""

    tiers = False
    names = tuple(sorted(OPTIONS))

    @initialize(at=st.integers(0, len(OPTIONS) - 1), composite=st.booleans())
    def begin(self, at: int, composite: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ckptkit-dropin-"))
        self.options = OPTIONS[self.names[at % len(self.names)]]
        self.composite = composite
        self.step = 0
        self.is_restarted = False
        self.open()

    def open(self) -> None:
        self.last_taken: int | None = None
        self.is_mode_settled = False  # a restore that finds nothing settles it in Orbax: a departure
        fast = [ckptkit.Tier.ram(str(self.root / "ram"), save=_Never())] if self.tiers else []
        self.ours = ckptkit.CheckpointManager(self.root / "ours", options=Options(**self.options), tiers=fast)
        self.stock = ocp.CheckpointManager(self.root / "stock", options=Options(**with_newest(self.options)))

    def both(self, call: Any) -> Any:
        found = outcome(lambda: call(self.ours))
        self.ours.wait_until_finished()  # two Orbax managers that save at once in one process disturb each other
        expected = outcome(lambda: call(self.stock))
        self.stock.wait_until_finished()
        assert found == expected, f"{found} where Orbax gives {expected}"
        return found

    @rule(
        ahead=st.integers(-3, 4),
        force=st.booleans(),
        loss=st.none() | st.integers(0, 3),
    )
    def save(self, ahead: int, force: bool, loss: int | None) -> None:
        step = max(0, self.step + ahead)
        if force and self.is_restarted:  # below the latest of an earlier run it would count as the newest: a departure
            step = max(step, self.step)
        if "todelete_subdir" in self.options:  # a number that comes twice cannot be renamed twice: stock Orbax fails
            step = max(step, self.step)
        step = step if force else self.above_pruned(step)
        force = force and not self.options.get("read_only")  # Orbax writes then: a departure
        item = args.StandardSave(tree(step))
        given = args.Composite(state=item, extra=args.JsonSave({"step": step})) if self.composite else item
        metrics = None if loss is None else {"loss": float(loss)}

        def save(manager: Any) -> Any:
            taken = manager.save(step, args=given, metrics=metrics, force=force, custom_metadata={"at": step})
            self.last_taken = step if taken else self.last_taken
            # A step in flight is listed. Orbax leaves out the steps that it will push out at once: a departure.
            return taken, None if "max_to_keep" in self.options else manager.latest_step()

        self.both(save)
        self.is_mode_settled = True
        self.step = max([self.step, *self.stock.all_steps()])

    def above_pruned(self, step: int) -> int:
        """A step that its own save has pruned counts as saved: a departure, kept out of the comparison."""
        is_pruned = self.last_taken is not None and self.last_taken not in self.stock.all_steps()
        return max(step, (self.last_taken or 0) + 1) if is_pruned else step

    @rule(step=st.integers(0, 12))
    def should_save(self, step: int) -> None:
        self.both(lambda m: m.should_save(self.above_pruned(step)))

    @rule(form=st.sampled_from(["none", "standard", "template"]), at=st.integers(0, 12))
    def restore(self, form: str, at: int) -> None:
        """Only the newest step: restoring an older one and saving on is a departure."""
        step = self.stock.latest_step()
        if step is None or step != max(self.stock.all_steps()):
            if self.is_mode_settled:
                self.both(lambda m: m.restore(100 + at))
            return
        item = {"none": None, "standard": args.StandardRestore(), "template": args.StandardRestore(tree(at))}[form]
        given = item if not self.composite or item is None else args.Composite(state=item)
        self.both(lambda m: m.restore(step, args=given))

    @rule(at=st.integers(0, 12))
    def delete(self, at: int) -> None:
        steps = list(self.stock.all_steps())
        self.last_taken = None
        if "todelete_subdir" in self.options:  # what is deleted may come again, and cannot be renamed twice
            self.step += 1
        self.both(lambda m: m.delete(steps[at % len(steps)] if steps and at < 9 else 100 + at))

    @rule(at=st.integers(0, 12))
    def look(self, at: int) -> None:
        steps = list(self.stock.all_steps())
        step = steps[at % len(steps)] if steps else at
        self.both(lambda m: m.metrics(step))
        self.both(lambda m: sorted(m.metadata(step).item_handlers.items()))
        self.both(lambda m: (m.metadata(step).custom_metadata, m.metadata(step).metrics))
        self.both(lambda m: m.metadata().custom_metadata)

    @rule()
    def reload(self) -> None:
        self.both(lambda m: m.reload())
        self.last_taken = None

    @rule()
    def reopen(self) -> None:
        self.both(lambda m: m.close())
        self.is_restarted = True
        self.open()

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "ours"):
            return
        self.both(lambda m: m.latest_step())
        self.both(lambda m: list(m.all_steps()))
        self.both(lambda m: m.best_step())

    def teardown(self) -> None:
        if hasattr(self, "ours"):
            self.ours.close()
            self.stock.close()
            shutil.rmtree(self.root, ignore_errors=True)


class _Never:
    """A fast tier that takes forced steps alone: then both managers take the same ones."""

    def due(self, step: int) -> bool:
        """Nothing is due."""
        del step
        return False


class SideBySideWithTiers(SideBySide):
    """With a ramdisk. It keeps what the durable tier prunes, so nothing is pruned here."""

    tiers = True
    names = ("default", "interval", "on steps", "a function", "prefix", "synchronous", "metrics not written")


# If one failed, a script that changed its import would behave differently where nothing is listed as a departure.
TestSideBySide = SideBySide.TestCase
TestSideBySide.settings = settings(deadline=None, max_examples=12, stateful_step_count=12)
TestSideBySideWithTiers = SideBySideWithTiers.TestCase
TestSideBySideWithTiers.settings = settings(deadline=None, max_examples=6, stateful_step_count=12)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [SideBySide, SideBySideWithTiers])
def test_random_runs_match_orbax(machine: type[SideBySide]) -> None:
    """As the short runs: rarer orders of calls."""
    run_state_machine_as_test(machine, settings=settings(deadline=None, max_examples=100, stateful_step_count=30))


def test_deletion_keeps_the_order_of_saves() -> None:
    """If it failed, a step forced below the latest would be pruned first, where Orbax goes by the order of saves."""
    run = SideBySide()
    run.begin(at=run.names.index("keep two and every fourth"), composite=False)
    try:
        for step, at in ((8, 0), (11, 3), (10, -1)):
            run.save(ahead=at if step > 8 else 8, force=True, loss=None)
            assert step in run.stock.all_steps()
        run.delete(at=0)
        run.save(ahead=4, force=True, loss=None)
        run.the_books_agree()
        assert list(run.ours.all_steps()) == [10, 15]
    finally:
        run.teardown()
