"""Reports saves and restores that ckptkit does to `jax.monitoring`, under the names that Orbax uses for its own.

Collectors that listen for Orbax's names still work when a manager of ours replaces it. As in Orbax, process 0 reports,
times are seconds (`*_time`: milliseconds since the epoch), and sizes are GiB of the whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jax import monitoring
from orbax.checkpoint._src.path import utils as path_utils

from ckptkit.util import clock

# Names of Orbax's saves and restores that describe its own way to write or read, which is not ours.
NOT_TOLD = {
    "/jax/orbax/write/directory_creation_secs": "directories are made as files are written",
    "/jax/orbax/write/async_directory_creation_secs": "the same",
    "/jax/orbax/write/blocking_directory_creation_secs": "the same",
    "/jax/orbax/write/background_directory_creation_secs": "the same",
    "/jax/orbax/write/blocking_sync_item_duration_secs": "items are not saved one after the other",
    "/jax/orbax/write/background_item_finalize_secs": "the same",
    "/jax/orbax/write/background_finalize_secs": "one mark commits a step",
    "/jax/orbax/write/finalize_duration_secs": "the same",
    "/jax/orbax/write/blocking_tree_map_duration_secs": "a part of the copy into the slot",
    "/jax/orbax/write/blocking_d2h_duration_secs": "the same",
    "/jax/orbax/write/blocking_val_duration_secs": "the same",
    "/jax/orbax/write/checkpoint_start_sync_duration_secs": "no barrier before a save",
    "/jax/checkpoint/write/async/metadata_write_duration_secs": "metadata are files among the others",
    "/jax/orbax/write/background_meta_write_secs": "the same",
    "/jax/checkpoint/write/async/ocdbt_merge_duration_secs": "nothing is merged",
    "/jax/orbax/write/background_ocdbt_merge_secs": "the same",
    "/jax/orbax/write/merge_ocdbt_per_process_files_secs": "the same",
    "/jax/checkpoint/write/async/commit_future_count": "there are no such futures",
    "/jax/checkpoint/write/async/commit_duration_sec": "TensorStore's futures, which are not waited for by themselves",
    "/jax/orbax/write/background_ts_duration_secs": "the same",
    "/jax/checkpoint/write/old_steps_examined_count": "the policies are asked without Orbax's manager",
    "/jax/checkpoint/write/get_old_steps_duration_secs": "a background thread finds them",
    "/jax/checkpoint/write/remove_steps_duration_secs": "a background thread deletes them",
    "/jax/checkpoint/write/preempt/duration_saved_secs": "the same",
    "/jax/orbax/write/replicated_array_gb": "one replica writes, and every box is counted once",
    "/jax/orbax/write/sharded_array_gb": "the same",
    "/jax/orbax/write/preemption": "Orbax's half reports it",
    "/jax/checkpoint/read/load_all_step_metadata_duration_secs": "Orbax's half reports it",
    "/jax/checkpoint/read/primary_replica_deserialization_duration_secs": "of Orbax's broadcast; ours is an event",
    "/jax/checkpoint/read/broadcast_duration_secs": "the same",
}


@final
@dataclass(frozen=True, slots=True)
class OrbaxMonitoring:
    """Reports to `jax.monitoring` what Orbax would report of saves to the root at `url`, and of restores."""

    url: str
    asynchronous: bool

    @property
    def _storage(self) -> str:
        return path_utils.get_storage_type(self.url)

    def save_staged(self, blocking_s: float, waited_s: float, tree_bytes: int) -> None:
        """A save to the durable tier has returned to the step loop, which it held for `blocking_s`."""
        base, now_s = ("/jax/orbax/write/async" if self.asynchronous else "/jax/orbax/write"), clock.wall_s()
        monitoring.record_event(f"{base}/start")
        _scalar(f"{base}/start_time", 1e3 * (now_s - blocking_s), storage_type=self._storage)
        monitoring.record_event("/jax/orbax/write/storage_type", storage_type=self._storage)
        _duration("/jax/checkpoint/write/wait_for_prev_duration_secs", waited_s)
        _duration("/jax/orbax/write/blocking_wait_prev_duration_secs", waited_s)
        if self.asynchronous:
            _duration("/jax/checkpoint/write/async/blocking_duration_secs", blocking_s)
        _duration(f"{base}/blocking_duration_secs", blocking_s, storage_type=self._storage)
        _scalar(f"{base}/blocking_end_time", 1e3 * now_s, storage_type=self._storage)
        _rate("/jax/orbax/write/blocking_gbytes_per_sec", tree_bytes, blocking_s - waited_s)

    def saves_apart(self, between_s: float) -> None:
        """A save began `between_s` after the one before."""
        name = "/jax/orbax/checkpoint_manager/time_between_consecutive_saves_secs"
        _duration(name, between_s, continuous_checkpointing_enabled=0)
        _duration("/jax/checkpoint/write/duration_since_last_checkpoint_secs", between_s)

    def save_committed(self, background_s: float, blocking_s: float, tree_bytes: int) -> None:
        """The durable tier holds the save, `background_s` after it was staged."""
        total_s = blocking_s + background_s
        monitoring.record_event("/jax/orbax/write/success")
        _rate("/jax/orbax/write/gbytes_per_sec", tree_bytes, total_s)
        _scalar("/jax/orbax/write/gbytes", tree_bytes / 2**30)
        if not self.asynchronous:
            _duration("/jax/orbax/write/total_duration_secs", total_s, storage_type=self._storage)
            return
        _duration("/jax/checkpoint/write/async/thread_duration_sec", background_s)
        _duration("/jax/orbax/write/background_duration_secs", background_s)
        _duration("/jax/checkpoint/write/async/total_duration_secs", total_s, storage_type=self._storage)
        _duration("/jax/orbax/write/async/total_duration_secs", total_s, storage_type=self._storage)

    def restore_began(self) -> None:
        """A restore begins."""
        monitoring.record_event("/jax/orbax/read/start")
        monitoring.record_event("/jax/orbax/read/storage_type", storage_type=self._storage)

    def restored(self, duration_s: float, tree_bytes: int) -> None:
        """A restore has returned."""
        _duration("/jax/orbax/read/blocking_duration_secs", duration_s, storage_type=self._storage)
        monitoring.record_event("/jax/orbax/read/success")
        _duration("/jax/orbax/read/total_duration_secs", duration_s, storage_type=self._storage)
        _rate("/jax/checkpoint/read/gbytes_per_sec", tree_bytes, duration_s)
        _scalar("/jax/checkpoint/read/gbytes", tree_bytes / 2**30)


def _duration(name: str, seconds: float, **labels: str | int) -> None:
    monitoring.record_event_duration_secs(name, seconds, **labels)


def _scalar(name: str, value: float, **labels: str | int) -> None:
    monitoring.record_scalar(name, value, **labels)


def _rate(name: str, nbytes: int, seconds: float) -> None:
    if seconds > 0:
        _scalar(name, nbytes / 2**30 / seconds)
