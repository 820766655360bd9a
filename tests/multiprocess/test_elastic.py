"""A run that is preempted and goes on, on other processes or another mesh: the same data, and the same bits.

`make campaign NAME=long`: two processes to one, and to another mesh, from one launched job.
The whole matrix: `make campaign NAME=elastic`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptkit import Kind
from ckptkit.launch import ExitCode
from tests.multiprocess.elastic import Run, Shape
from tools.proof import load_proof

STEPS = 60  # a preemption is noticed after a second or two: some 20 quick steps


def one(mesh: str, devices: int) -> Shape:
    return Shape(processes=1, devices=devices, mesh=mesh)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


def check_chain(
    root: Path, corpus: Path, shapes: Sequence[Shape], *, batch: int, steps: int, wipe: bool = True
) -> tuple[Run, Run]:
    """A run over `shapes`, preempted at the end of each but the last, against an undisturbed one on the first mesh."""
    reference = Run(directory=root / "reference", batch=batch, steps=steps, corpus=corpus, keeps=False)
    devices = shapes[0].processes * shapes[0].devices
    assert reference.launch(one(shapes[0].mesh, devices)) == ExitCode.OK, reference.said
    run = Run(directory=root / "run", batch=batch, steps=steps, corpus=corpus)
    for shape in shapes[:-1]:
        assert run.launch(shape, preempt_at=1) == ExitCode.PREEMPTED, run.said
        if wipe:
            shutil.rmtree(run.directory / "ram")  # of lost hosts
    assert run.launch(shapes[-1]) == ExitCode.OK, run.said
    resumed = check_preemptions(run, [("ram", "durable")] * (len(shapes) - 1))
    assert len(resumed) == len(shapes) - 1
    expected, found = reference.taken(), run.taken()
    assert list(found) == list(expected) == list(range(steps))
    for step in expected:
        assert found[step][0] == expected[step][0], f"step {step} read other records"
    other = [step for step, shape in zip(resumed, shapes[1:], strict=True) if shape.mesh != shapes[0].mesh]
    for step in range(min(other, default=steps)):
        assert found[step] == expected[step], f"step {step}: on the same mesh the loss is the same to the bit"
    if not other:
        assert load_proof(run.proofs[-1]).boxes == load_proof(reference.proofs[-1]).boxes
    return reference, run


def check_preemptions(run: Run, tiers: Sequence[tuple[str, ...]]) -> list[int]:
    """At each preemption every process saved the same step in its `tiers`, and the next launch, if any, resumed from it
    without loss. Returns the steps from which it did."""
    saved, resumed = run.events(Kind.PREEMPTED), run.events(Kind.RESUMED)
    tiers_of = {event.step: tuple(event.fields["tiers"]) for event in saved if event.step is not None}
    assert list(tiers_of.values()) == list(tiers), saved
    assert all(tuple(event.fields["tiers"]) == tiers_of[event.step] for event in saved if event.step is not None)
    steps = list(dict.fromkeys(event.step for event in resumed if event.step is not None))
    assert steps == list(tiers_of)[: len(steps)]
    assert len(steps) >= len(tiers) - 1, "a launch did not go on"
    assert {event.fields["repeated"] for event in resumed} == {0}, "nothing is lost, and nothing done twice"
    return steps


SHARDED = "fsdp=4"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def preempted(root: Path, corpus: Path) -> Run:
    """Two processes, fully sharded with copies on the other host, preempted twice: host 1's ramdisk is lost after the
    first time, and all that is in memory after the second."""
    run, shape = (
        Run(directory=root / "run", batch=8, steps=STEPS, corpus=corpus),
        Shape(processes=2, devices=2, mesh=SHARDED),
    )
    assert run.launch(shape, "--peer-copies", "1", preempt_at=1) == ExitCode.PREEMPTED, run.said
    lost = list((run.directory / "ram").glob("*/host-1*"))
    assert lost
    for directory in lost:
        shutil.rmtree(directory)
    assert run.launch(shape, "--peer-copies", "1", preempt_at=1) == ExitCode.PREEMPTED, run.said
    shutil.rmtree(run.directory / "ram")
    return run


@pytest.fixture(scope="module")
def reference(root: Path, corpus: Path) -> Run:
    """The same without anything that happens."""
    run = Run(directory=root / "reference", batch=8, steps=STEPS, corpus=corpus, keeps=False)
    assert run.launch(one(SHARDED, 4)) == ExitCode.OK, run.said
    return run


@pytest.mark.long
def test_shares_of_a_lost_host_are_read_from_its_peer(preempted: Run) -> None:
    """A fully sharded trainer that loses one host would read the bucket."""
    restored = preempted.events(Kind.RESTORED)
    sources = {event.process: {tier for tier, size in event.fields["sources"].items() if size} for event in restored}
    assert sources == {0: {"ram"}, 1: {"peer"}}


@pytest.mark.long
def test_preempted_job_of_two_processes_resumes_as_one(root: Path, preempted: Run, reference: Run) -> None:
    """Breaks when a preemption loses steps, or a job that comes back with fewer hosts trains something else."""
    run = preempted.copied(root / "as-one")
    assert run.launch(one(SHARDED, 4)) == ExitCode.OK, run.said
    check_preemptions(run, [("ram", "peer", "durable")] * 2)
    assert run.events(Kind.RESUMED)[-1].fields["processes"] == 1
    expected, found = reference.taken(), run.taken()
    assert list(expected) == list(range(STEPS))
    assert found == expected, "on the same mesh the records and the loss of each step are the same to the bit"
    assert load_proof(run.proofs[-1]).boxes == load_proof(reference.proofs[-1]).boxes


@pytest.mark.long
def test_lost_job_reads_the_bucket_once_and_resumes_on_new_mesh(root: Path, preempted: Run, reference: Run) -> None:
    """One that loses all of its hosts would read the bucket as often as it has replicas; one that comes back on another
    mesh skip records or read them twice."""
    run = preempted.copied(root / "replicated")
    shape = Shape(processes=2, devices=2, mesh="data=2,fsdp=2")
    assert run.launch(shape, "--broadcast", "always", preempt_at=1) == ExitCode.PREEMPTED, run.said
    resumed = check_preemptions(run, [("ram", "peer", "durable")] * 2 + [("ram", "durable")])
    told = [line for line in run.output if "preempted: step" in line]
    assert len(told) == 2, run.said
    assert "is saved in ram, durable" in told[0]
    first, second = run.events(Kind.RESTORED)[-2:]
    read_bytes = sum(event.fields["sources"]["durable"] for event in (first, second))
    for event in (first, second):
        assert event.fields["broadcast"] is True, event.fields
        assert set(event.fields["sources"]) == {"durable", "replica"}
        assert sum(event.fields["sources"].values()) <= 1.01 * read_bytes, "each wants all of the state"
    expected, found = reference.taken(), run.taken()
    assert list(found) == list(range(len(found)))
    assert len(found) > resumed[-1], "no step was taken on the other mesh"
    for step, (rows, losses) in found.items():
        assert rows == expected[step][0], f"step {step} read other records"
        assert step >= resumed[-1] or losses == expected[step][1], f"step {step}: the same loss to the bit"


@pytest.mark.slow
def test_any_number_of_processes_restores_any_other(tmp_path: Path, corpus: Path) -> None:
    """Breaks when some number of processes cannot read what another one wrote: 4 -> 2 -> 3 -> 1 -> 4."""
    mesh = "data=3,fsdp=4"  # 12 devices divide among any of them
    shapes = [Shape(processes=n, devices=12 // n, mesh=mesh) for n in (4, 2, 3, 1, 4)]
    check_chain(tmp_path, corpus, shapes, batch=12, steps=60)


@pytest.mark.slow
def test_any_mesh_restores_any_other(tmp_path: Path, corpus: Path) -> None:
    """Breaks when a layout cannot follow another: (data=2,fsdp=2) -> (data=1,fsdp=4) -> (model=4)."""
    meshes = ("data=2,fsdp=2", "data=1,fsdp=4", "model=4")
    check_chain(tmp_path, corpus, [Shape(processes=2, devices=2, mesh=mesh) for mesh in meshes], batch=8, steps=STEPS)


@pytest.mark.slow
def test_fast_tiers_of_remaining_hosts_are_used(tmp_path: Path, corpus: Path) -> None:
    """Breaks when a job that comes back as it was reads the bucket for what its memory holds."""
    shapes = [Shape(processes=2, devices=2, mesh="data=2,fsdp=2")] * 2
    _, run = check_chain(tmp_path, corpus, shapes, batch=8, steps=30, wipe=False)
    assert {tier for event in run.events(Kind.RESTORED) for tier in event.fields["sources"]} == {"ram"}
