"""Every field of Orbax's `CheckpointManagerOptions`: what it does, and that it does it with and without a fast tier."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint._src.futures import future

import ckptkit
from ckptkit.durable import prune
from ckptkit.durable.orbax import manager as stock

args: Any = ocp.args
Options = ocp.CheckpointManagerOptions
LOSSES = {0: 3.0, 1: 1.0, 2: 2.0, 3: 4.0}


class Job:
    """A directory, and managers over it with one field set; a ramdisk takes every step of every second job."""

    def __init__(self, root: Path, tiers: bool):
        self.root = root
        self.durable = root / "durable"
        self.tiers = tiers

    def manager(self, metadata: Any = None, **options: Any) -> Any:
        fast = [ckptkit.Tier.ram(str(self.root / "ram"))] if self.tiers else []
        return ckptkit.CheckpointManager(
            self.durable, options=Options(**options), metadata=metadata, tiers=fast, host_id="host"
        )

    def run(self, steps: Any = range(4), **options: Any) -> list[str]:
        """Saves steps one by one, with metrics; the names in the durable root."""
        with self.manager(**options) as manager:
            for step in steps:
                metrics = {"loss": LOSSES[step]} if step in LOSSES else None
                manager.save(step, args=args.StandardSave({"w": np.arange(3) + step}), metrics=metrics)
                manager.wait_until_finished()
        return self.names()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.durable.glob("[!_.]*")) if self.durable.exists() else []


@pytest.fixture(params=[False, True], ids=["durable", "ram"])
def job(request: Any, tmp_path: Path) -> Callable[[], Job]:
    """Makes jobs in directories of their own."""
    made: list[Job] = []

    def make() -> Job:
        made.append(Job(tmp_path / str(len(made)), request.param))
        made[-1].root.mkdir()
        return made[-1]

    return make


def _loss(metrics: Any) -> float:
    return metrics["loss"]


ALL = ["0", "1", "2", "3"]
# The content of the durable root after steps 0 to 3; the newest step is kept whatever its metrics are.
# field, options without it, options with it, names without, with.
BY_NAMES: list[tuple[str, dict[str, Any], dict[str, Any], list[str], list[str]]] = [
    ("save_interval_steps", {}, {"save_interval_steps": 3}, ALL, ["0", "3"]),
    ("max_to_keep", {}, {"max_to_keep": 2}, ALL, ["2", "3"]),
    ("keep_time_interval", {"max_to_keep": 1}, {"keep_time_interval": datetime.timedelta(0)}, ["3"], ALL),
    ("keep_period", {"max_to_keep": 1}, {"keep_period": 2}, ["3"], ["0", "2", "3"]),
    ("best_fn", {"max_to_keep": 1}, {"best_fn": _loss}, ["3"], ["3"]),
    ("best_mode", {"max_to_keep": 1, "best_fn": _loss}, {"best_mode": "min"}, ["3"], ["1", "3"]),
    ("step_prefix", {}, {"step_prefix": "at"}, ALL, ["at_0", "at_1", "at_2", "at_3"]),
    ("step_format_fixed_length", {}, {"step_format_fixed_length": 3}, ALL, ["000", "001", "002", "003"]),
    (
        "step_name_format",
        {},
        {"step_name_format": ocp.path.step.standard_name_format(step_prefix="s", step_format_fixed_length=2)},
        ALL,
        ["s_00", "s_01", "s_02", "s_03"],
    ),
    ("save_on_steps", {"save_interval_steps": 3}, {"save_on_steps": [2]}, ["0", "3"], ["0", "2", "3"]),
    ("todelete_subdir", {"max_to_keep": 1}, {"todelete_subdir": "trash"}, ["3"], ["3", "trash"]),
    ("should_save_fn", {}, {"should_save_fn": lambda step, last: step == 1}, ALL, ["1"]),
    (
        "save_decision_policy",
        {},
        {"save_decision_policy": policies.SpecificStepsPolicy([1, 3])},
        ALL,
        ["1", "3"],
    ),
    ("preservation_policy", {}, {"preservation_policy": policies.preservation_policy.LatestN(1)}, ALL, ["3"]),
    ("read_only", {}, {"read_only": True}, ALL, []),
]
ELSEWHERE = {
    "keep_checkpoints_without_metrics",
    "create",
    "cleanup_tmp_directories",
    "single_host_load_and_broadcast",
    "todelete_full_path",
    "enable_background_delete",
    "num_deletion_threads",
    "enable_async_checkpointing",
    "async_options",
    "multiprocessing_options",
    "file_options",
    "atomicity_options",
    "save_root_metadata",
    "temporary_path_class",
    "prevent_write_metrics",
    "enable_should_save_is_saving_in_progress_check",
    "enable_per_process_directory_creation",
    "lightweight_initialize",
}


def test_every_orbax_option_has_a_test() -> None:
    """A field of a newer Orbax would be dropped without a message."""
    tested = {row[0] for row in BY_NAMES} | ELSEWHERE
    assert tested == {field.name for field in dataclasses.fields(Options)}


@pytest.mark.parametrize("row", BY_NAMES, ids=lambda row: row[0])
def test_option_decides_which_steps_are_kept(job: Callable[[], Job], row: Any) -> None:
    """The option would be accepted and do nothing."""
    _, unset, added, names_unset, names_set = row
    assert job().run(**unset) == names_unset
    assert job().run(**unset, **added) == names_set


def test_best_fn_chooses_the_best_step(job: Callable[[], Job]) -> None:
    """An evaluation would read the newest step for the best."""
    for options, best in (({}, 3), ({"best_fn": _loss}, 3), ({"best_fn": _loss, "best_mode": "min"}, 1)):
        each = job()
        each.run(**options)
        with each.manager(**options) as manager:
            assert manager.best_step() == best


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("losses", list(itertools.permutations((1.0, math.nan, 2.0, -math.inf, math.nan)))[::23])
@pytest.mark.parametrize("by_policy", [False, True])
def test_a_metric_that_is_nan_is_worse_than_every_number(
    job: Callable[[], Job], losses: tuple[float, ...], mode: Any, by_policy: bool
) -> None:
    """The best step was deleted, or `best_step` named one whose loss was NaN, by the order of the saves."""
    options: dict[str, Any] = {"best_fn": _loss, "best_mode": mode, "max_to_keep": 2}
    if by_policy:
        best = policies.BestN(get_metric_fn=_loss, reverse=mode == "min", n=2)
        options = {**options, "max_to_keep": None, "preservation_policy": policies.AnyPreservationPolicy([best])}
    numbers = sorted((loss, step) for step, loss in enumerate(losses) if not math.isnan(loss))
    best_two = [step for _, step in (numbers[:2] if mode == "min" else numbers[::-1][:2])]
    each = job()
    each.tiers = False
    with each.manager(**options) as manager:
        for step, loss in enumerate(losses):
            manager.save(step, args=args.StandardSave({"w": np.arange(3)}), metrics={"loss": loss})
            manager.wait_until_finished()
        assert manager.best_step() == best_two[0]
        assert set(best_two) <= set(manager.all_steps())
    with each.manager(**options) as manager:
        assert manager.best_step() == best_two[0]


def test_a_step_that_only_a_fast_tier_holds_is_not_the_best_step(tmp_path: Path) -> None:
    """`best_step` was a step of the ramdisk, which a few saves later no tier had."""
    options: dict[str, Any] = {"best_fn": _loss, "best_mode": "min", "save_interval_steps": 5}
    with Job(tmp_path, tiers=True).manager(**options) as manager:
        for step, loss in enumerate((3.0, 1.0, 2.0, 4.0)):
            manager.save(step, args=args.StandardSave({"w": np.arange(3)}), metrics={"loss": loss})
            manager.wait_until_finished()
            assert manager.best_step() == 0
        manager.save(5, args=args.StandardSave({"w": np.arange(3)}), metrics={"loss": 0.5})
        assert manager.best_step() == 5, "in flight to the durable root"
        manager.wait_until_finished()
        assert manager.best_step() == 5


@pytest.mark.parametrize("value", ["good", None, [], {"a": 1}])
def test_a_metric_of_the_wrong_type_counts_as_none(tmp_path: Path, value: Any) -> None:
    """`best_step` and every later save raised because of one step of another run."""
    each = Job(tmp_path, tiers=False)
    anything: dict[str, Any] = {"best_fn": lambda metrics: 0.0}
    with each.manager(**anything) as manager:
        for step, loss in enumerate((1.0, value)):
            manager.save(step, args=args.StandardSave({"w": np.arange(3)}), metrics={"loss": loss})

    with each.manager(best_fn=_loss) as manager:
        assert manager.best_step() == 0
    with each.manager(best_fn=lambda metrics: metrics["other"]) as manager, pytest.raises(KeyError, match="other"):
        manager.best_step()
    with each.manager(best_fn=_loss, max_to_keep=1) as manager:
        with pytest.raises(TypeError, match="it must return a number"):
            manager.save(2, args=args.StandardSave({"w": np.arange(3)}), metrics={"loss": value})
        manager.save(2, args=args.StandardSave({"w": np.arange(3)}), metrics={"loss": (2.0, 1.0)})
        manager.wait_until_finished()
        assert (manager.all_steps(), manager.best_step()) == ([1, 2], 2), "1 is kept as one without metrics"


def test_keep_checkpoints_without_metrics_option(job: Callable[[], Job]) -> None:
    """Steps without metrics would push out good ones, or never go."""
    kept = {"max_to_keep": 1, "best_fn": _loss}
    assert job().run(range(3, 6), **kept) == ["3", "4", "5"]
    assert job().run(range(3, 6), **kept, keep_checkpoints_without_metrics=False) == ["3", "5"]


def test_create_option_decides_whether_the_root_is_made(job: Callable[[], Job]) -> None:
    """A mistyped path would be made."""
    made, missing = job(), job()
    with made.manager(), missing.manager(create=False) as manager:
        assert manager.all_steps() == []
    assert made.durable.exists()
    assert not missing.durable.exists()


def test_cleanup_tmp_directories_option(job: Callable[[], Job]) -> None:
    """The leftovers of a crash would be billed without an end."""
    for options, left in (({}, True), ({"cleanup_tmp_directories": True}, False)):
        each = job()
        each.run(range(1))
        left_behind = each.durable / "7.orbax-checkpoint-tmp"
        left_behind.mkdir()
        each.run(range(1, 2), **options)
        assert left_behind.exists() == left


def test_single_host_load_and_broadcast_must_match_name_format(job: Callable[[], Job]) -> None:
    """With it set, Orbax would broadcast over the devices, from a background thread too. The remaining difference is
    Orbax's check: the name format must agree."""
    alone, shared = (
        ocp.path.step.standard_name_format(step_prefix="s", single_host_load_and_broadcast=both)
        for both in (False, True)
    )
    allowed = [({}, alone), ({"single_host_load_and_broadcast": True}, shared)]
    for options, names in [*allowed, ({}, None), ({"single_host_load_and_broadcast": True}, None)]:
        each = job()
        assert each.run(**options, step_name_format=names) == (ALL if names is None else ["s_0", "s_1", "s_2", "s_3"])
        with each.manager(**options, step_name_format=names) as manager:
            assert manager.all_steps(read=True) == [0, 1, 2, 3]
    for options, names in (({}, shared), ({"single_host_load_and_broadcast": True}, alone)):
        with pytest.raises(ValueError, match="single_host_load_and_broadcast"):
            job().run(**options, step_name_format=names)


def test_todelete_full_path_is_refused_outside_buckets(job: Callable[[], Job]) -> None:
    """Orbax refuses it elsewhere when it deletes: by then a run has saved for hours, and keeps steps without an end."""
    with pytest.raises(ValueError, match="todelete_full_path is for gs://"):
        job().run(range(1), max_to_keep=1, todelete_full_path="trash")
    reader = job()
    reader.run(range(1))
    with reader.manager(todelete_full_path="trash", read_only=True) as manager:  # an evaluator with the run's options
        assert manager.latest_step() == 0
    with pytest.raises(ValueError, match="both cannot be set"):
        job().run(todelete_subdir="a", todelete_full_path="b")


def test_background_deletion_ends_with_close(job: Callable[[], Job]) -> None:
    """Deletions would be lost at the end of the job, or counted as steps meanwhile."""
    for options in ({}, {"enable_background_delete": True}, {"num_deletion_threads": 2}):
        assert job().run(max_to_keep=1, **options) == ["3"]


def test_deletion_runs_on_its_own_thread(job: Callable[[], Job], monkeypatch: Any) -> None:
    """A save would take as long as the deletion of an old step: minutes in a bucket."""
    seen: list[str] = []
    real = prune.delete_directory

    def recorded(path: str, options: Any) -> None:
        seen.append(threading.current_thread().name)
        real(path, options)

    monkeypatch.setattr(prune, "delete_directory", recorded)
    for options in ({}, {"enable_background_delete": True}):
        each = job()
        assert each.run(max_to_keep=1, **options) == ["3"]
        assert set(seen) == {"ckptkit-prune_0"}
        seen.clear()


def test_num_deletion_threads_option(job: Callable[[], Job], monkeypatch: Any) -> None:
    """Deleting on a mount with slow unlinks would take as long as without it."""
    given: list[Any] = []
    real = stock.deleter.PathDeleter

    def recorded(directory: Any, *, num_threads: Any) -> Any:
        given.append(num_threads)
        return real(directory, num_threads=num_threads)

    monkeypatch.setattr(stock.deleter, "PathDeleter", recorded)
    job().run(max_to_keep=1, num_deletion_threads=40)
    assert set(given) == {40}


def test_enable_async_checkpointing_option(job: Callable[[], Job], monkeypatch: Any) -> None:
    """A script that copies the step after `save` would copy half of it."""
    hold_the_durable_tier(monkeypatch, threading.Event(), wait_s=0.2)
    for options, committed in (({}, False), ({"enable_async_checkpointing": False}, True)):
        with job().manager(**options) as manager:
            manager.save(0, args=args.StandardSave({"w": np.arange(3)}))
            assert (0 in manager._durable.steps()) == committed


def test_async_options_callback_is_called(job: Callable[[], Job]) -> None:
    """The callback that copies finished steps away would never be called."""
    called: list[int] = []
    job().run(range(2))
    assert called == []
    job().run(range(2), async_options=ocp.AsyncOptions(post_finalization_callback=lambda: called.append(1)))
    assert called == [1, 1]
    with pytest.raises(ValueError, match="post_finalization_callback is only supported"):
        job().manager(
            enable_async_checkpointing=False, async_options=ocp.AsyncOptions(post_finalization_callback=lambda: None)
        )


def test_multiprocessing_options_separate_barriers(job: Callable[[], Job]) -> None:
    """Two managers of one job would join each other's barriers."""
    given = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix="mine")
    for options, prefix in (({}, None), ({"multiprocessing_options": given}, "mine")):
        with job().manager(**options) as manager:
            manager.save(0, args=args.StandardSave({"w": np.arange(3)}))
            manager.wait_until_finished()
            assert manager._durable.stock.orbax._multiprocessing_options.barrier_sync_key_prefix == prefix


def test_file_options_set_permissions(job: Callable[[], Job]) -> None:
    """Checkpoints would be readable by everybody on a shared machine."""
    for options, mode in (({}, 0o755), ({"file_options": ocp.options.FileOptions(path_permission_mode=0o700)}, 0o700)):
        each = job()
        each.run(range(1), **options)
        assert (each.durable / "0").stat().st_mode & 0o777 == mode
        assert each.durable.stat().st_mode & 0o777 == mode


def test_atomicity_options_require_the_commit_file(job: Callable[[], Job]) -> None:
    """On a mount without atomic rename a half-written step would pass for a whole one."""
    given = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    by_class = {"temporary_path_class": ocp.path.atomicity.CommitFileTemporaryPath}
    for options in ({"atomicity_options": given}, by_class):
        each = job()
        each.run(range(1), **options)
        marker = each.durable / "0" / "commit_success.txt"
        assert marker.exists()
        marker.unlink()
        with each.manager(**options) as manager:
            assert 0 not in manager._durable.steps()
        with each.manager() as manager:
            assert 0 in manager._durable.steps()


def test_save_root_metadata_option(job: Callable[[], Job]) -> None:
    """The description of the run would be lost, or written where it must not be."""
    for options, written in (({}, True), ({"save_root_metadata": False}, False)):
        each = job()
        with each.manager(metadata={"lang": "en"}, **options):
            assert ("metadata" in each.names()) == written
        with each.manager(**options) as manager:
            assert manager.metadata().custom_metadata == ({"lang": "en"} if written else {})


def test_prevent_write_metrics_option(job: Callable[[], Job]) -> None:
    """Metrics that must not leave the machine would be written."""
    for options, found in (({}, {"loss": 1.0}), ({"prevent_write_metrics": True}, None)):
        each = job()
        each.run(best_fn=_loss, **options)
        with each.manager(best_fn=_loss, **options) as manager:
            assert manager.metrics(1) == found
            assert manager.best_step() == (3 if found else None)


def test_should_save_in_progress_check_option(job: Callable[[], Job], monkeypatch: Any) -> None:
    """Continuous checkpointing would queue saves up, or skip them although it was told not to look."""
    for options, taken in (({}, False), ({"enable_should_save_is_saving_in_progress_check": False}, True)):
        release = threading.Event()
        with monkeypatch.context() as patched:
            hold_the_durable_tier(patched, release, wait_s=30)
            policy = policies.ContinuousCheckpointingPolicy()
            each = job()
            each.tiers = False  # a ramdisk takes the step anyway
            with each.manager(save_decision_policy=policy, **options) as manager:
                assert manager.save(0, args=args.StandardSave({"w": np.arange(3)}))
                assert manager.should_save(1) == taken
                release.set()
                manager.wait_until_finished()
                assert manager.should_save(1)


def test_per_process_directory_creation_option(job: Callable[[], Job], monkeypatch: Any) -> None:
    """Orbax allows it only where no process is primary, and then each has signals of its own."""
    alone = ocp.options.MultiprocessingOptions(primary_host=None)
    with pytest.raises(ValueError, match="primary_host is None"):
        job().run(enable_per_process_directory_creation=True)
    contract = future.AwaitableSignalsContract
    monkeypatch.setattr(contract, "awaitable_signals_contract_prefix", "signals")
    assert job().run(multiprocessing_options=alone) == ALL
    assert contract.awaitable_signals_contract_prefix == "signals"
    assert job().run(enable_per_process_directory_creation=True, multiprocessing_options=alone) == ALL
    assert contract.awaitable_signals_contract_prefix.startswith("signals_0")


def test_lightweight_initialize_reads_no_metrics(job: Callable[[], Job]) -> None:
    """A restart would read the metrics of ten thousand steps."""
    each = job()
    each.run(best_fn=_loss)
    with each.manager(best_fn=_loss) as manager:
        assert manager.best_step() == 3
    with each.manager(best_fn=_loss, lightweight_initialize=True) as manager:
        assert manager.best_step() is None
        assert manager.all_steps() == [0, 1, 2, 3]


def hold_the_durable_tier(monkeypatch: Any, release: threading.Event, *, wait_s: float) -> None:
    """Durable saves begin only when `release` is set, or `wait_s` later."""
    from ckptkit.durable.steps import DurableSteps

    real = DurableSteps.save

    def held(self: Any, *given: Any, **more: Any) -> None:
        release.wait(wait_s)
        real(self, *given, **more)

    monkeypatch.setattr(DurableSteps, "save", held)
