"""`python -m bench gather`: the cost for process 0 of a large job to collect and rank the inventories of all processes.
Also the size of the manifests of a job of many devices, and the time to read one.

The coordination service is JAX's own, on loopback. The other processes' values are put there beforehand, so only
process 0's part is measured: it reads them one by one, ranks, and gives its verdict. All of a real job's processes
would write at the same time.

Manifests are made on paper: records of leaves over a mesh of devices that do not exist. The device order of the mesh is
shuffled, as on hardware whose neighbours are chosen: an ordered mesh has no list of devices.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import jax

from bench.environment import environment, store_result
from ckptkit.durable.orbax.shardings import sharding_of_text
from ckptkit.errors import CorruptCheckpointError, Reason
from ckptkit.job import meeting
from ckptkit.job.coordination import JaxCoordinator
from ckptkit.model import manifest_checks
from ckptkit.model.boxes import Box
from ckptkit.model.digests import DIGEST_BYTES
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from ckptkit.restore.inventory import Held, holders_of, to_runs
from ckptkit.restore.plan import rank_candidates
from ckptkit.util import clock

_SAVES = [SaveId(3, 1000 + step, step) for step in range(5)]  # as many as three ramdisk and two disk slots hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """One simulated gather. Bytes are of JSON."""

    processes: int
    bytes_per_process_and_save_max: int
    gathered_bytes: int
    told_bytes: int  # who holds what of the chosen save, if every process is where it was
    told_shuffled_bytes: int  # the same if the scheduler has shuffled all hosts
    gather_s: float  # process 0: read all, parse, rank, answer


def measure(processes: int, *, repeats: int = 5) -> Gathering:
    """Gathers `processes` reports of five saves, one of whose hosts is lost. Initialises `jax.distributed` once."""
    coordinator = _coordinator(processes)
    rng = random.Random(7)
    shuffled = rng.sample(range(processes), processes)
    reports = [_report(process, process) for process in range(processes)]
    texts = [json.dumps(report) for report in reports]
    spent_s = []
    told: dict[str, int] = {}

    def rank(values: list[Any]) -> list[str]:
        assert len(values) == processes, f"the values of {len(values)} processes were collected"
        heard = [[Held.from_json(entry) for entry in report] for report in values]
        fast = [{held.save_id: held.refusal for held in report} for report in heard]
        ranked = rank_candidates(fast, [], lambda _: False, linked=True)
        told["bytes"] = len(json.dumps(to_runs(holders_of(heard, ranked[0].save_id))))
        return [str(candidate.save_id) for candidate in ranked]

    for number in range(repeats):
        for process in range(1, processes):
            place = meeting._place_of(f"{coordinator._meetings._prefix}/gather/{number}", process)
            coordinator._ask("key_value_set", place, texts[process])
        began_s = clock.monotonic_s()
        ranked = coordinator.agree("gather", reports[0], rank, timeout_s=600)
        spent_s.append(clock.monotonic_s() - began_s)
        assert ranked == [str(save) for save in reversed(_SAVES)]
    moved = [[Held.from_json(entry) for entry in _report(process, shuffled[process])] for process in range(processes)]
    return Gathering(
        processes=processes,
        bytes_per_process_and_save_max=max(len(json.dumps(entry)) for report in reports for entry in report),
        gathered_bytes=sum(map(len, texts)),
        told_bytes=told["bytes"],
        told_shuffled_bytes=len(json.dumps(to_runs(holders_of(moved, _SAVES[-1])))),
        gather_s=statistics.median(spent_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSize:
    """The manifest that one process of a job writes for a save, and the time to read it with empty caches."""

    devices: int
    leaves: int
    boxes: int
    shardings: int  # distinct ones
    manifest_bytes: int
    digest_bytes: int
    bytes_per_leaf_and_box: float  # without digests: leaves and boxes count alike
    parse_s: float
    shardings_s: float  # to make shardings of today's devices of all leaves' texts


def measure_manifest(devices: int, *, leaves: int = 4000, ordered: bool = False) -> ManifestSize:
    """One process with four devices; a third each of the leaves is split over two axes, over one, and replicated."""
    records, boxes = [], 0
    texts = _sharding_texts(devices, ordered=ordered)
    shards = math.isqrt(devices)
    for number in range(leaves):
        split = number % len(texts)
        rows = 4 if split < 6 else 1
        box_records = tuple(
            BoxRecord(box=Box((8 * at, 0), (8 * at + 8, 64)), offset=4096 * (boxes + at), digests=(f"{at:032x}",))
            for at in range(rows)
        )
        boxes += rows
        records.append(
            LeafRecord(
                path=("state", "params", "layers", str(number // 12), f"weights_{number % 12}", "value"),
                keys="ddddda",
                kind="jax",
                shape=(8 * max(shards, 4), 64),
                dtype="bfloat16",
                cell=(8, 64),
                extra={"sharding": texts[split]},
                boxes=box_records,
            )
        )
    writer = Writer(process=0, count=devices // 4, host="host-0")
    manifest = Manifest(
        save_id=_SAVES[0], writer=writer, slot="slot-0.bin", arrays={"state": tuple(records)}, inline={}
    )
    data = manifest.to_bytes()
    _forget_parsed()
    began_s = clock.monotonic_s()
    read = Manifest.from_bytes(data, path="on paper")
    parse_s = clock.monotonic_s() - began_s
    assert read == manifest
    began_s = clock.monotonic_s()
    for leaf in read.arrays["state"]:
        sharding_of_text(leaf.extra["sharding"])
    shardings_s = clock.monotonic_s() - began_s
    digest_bytes = boxes * DIGEST_BYTES
    return ManifestSize(
        devices=devices,
        leaves=leaves,
        boxes=boxes,
        shardings=len(texts),
        manifest_bytes=len(data),
        digest_bytes=digest_bytes,
        bytes_per_leaf_and_box=(len(data) - digest_bytes) / (leaves + boxes),
        parse_s=parse_s,
        shardings_s=shardings_s,
    )


def _sharding_texts(devices: int, *, ordered: bool) -> list[str]:
    """Orbax's text of nine specs over one mesh."""
    ids = list(range(devices))
    if not ordered:
        random.Random(7).shuffle(ids)
    rows = 1 << (devices.bit_length() // 2)
    mesh = [[{"id": each} for each in ids[at : at + devices // rows]] for at in range(0, devices, devices // rows)]
    words = {
        "sharding_type": "NamedSharding",
        "shape": [rows, devices // rows],
        "axis_names": ["fsdp", "tensor"],
        "axis_types": ["AxisType.Auto", "AxisType.Auto"],
    }
    axes: list[Any] = [None, "fsdp", "tensor"]
    specs = [[a, b] for a in axes[1:] for b in axes] + [[None, b] for b in axes]
    devices_of = {} if ordered else {"device_mesh": {"mesh": mesh}}
    return [json.dumps({**words, "partition_spec": spec, **devices_of}) for spec in specs]


def _forget_parsed() -> None:
    """As in a process that has read none yet."""
    for remembered in (manifest_checks._check_facts, manifest_checks._check_sharding, manifest_checks._boxes_within):
        remembered.cache_clear()
    sharding_of_text.cache_clear()


_UNCOVERED = Reason.of(CorruptCheckpointError("nothing covers leaf state:params.h0.w"))


def _report(process: int, share: int) -> list[list[Any]]:
    lost = 17  # a host that came back empty
    return [
        Held(
            save_id=save,
            count=10**4,
            shares=((share, f"{share:016x}"),),
            tiers=("ram", "ssd"),
            refusal=None
            if save == _SAVES[-1]
            else Reason.of(CorruptCheckpointError("nothing covers leaf state:params.h0.w")),
        ).to_json()
        for save in _SAVES
        if process != lost
    ]


def _coordinator(processes: int) -> JaxCoordinator:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    jax.distributed.initialize(address, 1, 0)
    with mock.patch.object(jax, "process_count", return_value=processes):
        return JaxCoordinator()


@click.command()
@click.option("--processes", type=click.IntRange(min=20), default=10_000, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--devices", type=int, multiple=True, default=(512, 4096, 16384), show_default=True, help="Of manifests.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="The same, as JSON.")
def main(processes: int, repeats: int, devices: tuple[int, ...], json_path: Path | None) -> None:
    """Simulates the gather at a restart and prints its size and time, and those of a manifest."""
    where = environment()
    found = measure(processes, repeats=repeats)
    for name in Gathering.__dataclass_fields__:
        print(f"{name}: {getattr(found, name):.3f}" if name == "gather_s" else f"{name}: {getattr(found, name)}")
    manifests = [measure_manifest(each) for each in devices]
    for size in manifests:
        print(", ".join(f"{name} {value}" for name, value in _rounded(asdict(size)).items()))
    print(f"load: {os.getloadavg()[0]:.1f}")
    jax.distributed.shutdown()
    sizes = [_rounded(asdict(size)) for size in manifests]
    result = {"benchmark": "gather", "environment": where, "repeats": repeats, **asdict(found), "manifests": sizes}
    store_result(result, json_path)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
