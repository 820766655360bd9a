"""A run that is preempted and goes on, on other processes or another mesh: the same data, and the same bits.

Default: two processes to one. The whole matrix: `make elastic-campaign`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptkit import Kind
from tests.multiprocess.elastic import Run, Shape
from tools.launch import ExitCode
from tools.proof import load_proof

STEPS = 60  # a preemption is noticed after a second or two: some 20 quick steps


def one(mesh: str, devices: int) -> Shape:
    return Shape(processes=1, devices=devices, mesh=mesh)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic-cache")


def check_chain(
    root: Path, cache: Path, shapes: Sequence[Shape], *, batch: int, steps: int, wipe: bool = True
) -> tuple[Run, Run]:
    """A run over `shapes`, preempted at the end of each but the last, against an undisturbed one on the first mesh."""
    reference = Run(directory=root / "reference", batch=batch, steps=steps, cache=cache, keeps=False)
    devices = shapes[0].processes * shapes[0].devices
    assert reference.launch(one(shapes[0].mesh, devices)) == ExitCode.OK, reference.said
    run = Run(directory=root / "run", batch=batch, steps=steps, cache=cache)
    for shape in shapes[:-1]:
        assert run.launch(shape, preempt_at=1) == ExitCode.PREEMPTED, run.said
        if wipe:
            shutil.rmtree(run.directory / "ram")  # of hosts that are gone
    assert run.launch(shapes[-1]) == ExitCode.OK, run.said
    resumed = check_preemptions(run, len(shapes) - 1)
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


def check_preemptions(run: Run, count: int, tiers: tuple[str, ...] = ("ram", "durable")) -> list[int]:
    """Every process saved the same step in every tier, and the next launch went on from it without loss."""
    saved, resumed = run.events(Kind.PREEMPTED), run.events(Kind.RESUMED)
    assert {tuple(event.fields["tiers"]) for event in saved} == {tiers}, saved
    steps = list(dict.fromkeys(event.step for event in saved if event.step is not None))
    assert len(steps) == count, "one agreed step for each preemption"
    assert list(dict.fromkeys(event.step for event in resumed)) == steps
    assert {event.fields["repeated"] for event in resumed} == {0}, "nothing is lost, and nothing done twice"
    return steps


def test_a_preempted_job_of_two_processes_goes_on_as_one(tmp_path: Path, cache: Path) -> None:
    """Breaks when a preemption loses steps, or a job that comes back with fewer hosts trains something else."""
    shapes = [Shape(processes=2, devices=2, mesh="data=2,fsdp=2"), one("data=2,fsdp=2", 4)]
    _, run = check_chain(tmp_path, cache, shapes, batch=8, steps=24)
    told = [line for line in run.output if "preempted: step" in line]
    assert len(told) == 2, run.said
    assert "is saved in ram, durable" in told[0]
    assert [event.fields["processes"] for event in run.events(Kind.RESUMED)] == [1]


def test_a_lost_host_is_read_from_its_buddy_and_a_lost_job_from_the_bucket_once(tmp_path: Path, cache: Path) -> None:
    """A fully sharded trainer that loses one host would read the bucket, and one that loses all of them read it as
    often as it has replicas."""
    sharded, replicated = (Shape(processes=2, devices=2, mesh=mesh) for mesh in ("fsdp=4", "data=2,fsdp=2"))
    reference = Run(directory=tmp_path / "reference", batch=8, steps=STEPS, cache=cache, keeps=False)
    assert reference.launch(one(sharded.mesh, 4)) == ExitCode.OK, reference.said
    run, copies = Run(directory=tmp_path / "run", batch=8, steps=STEPS, cache=cache), ("--peer-copies", "1")
    assert run.launch(sharded, *copies, preempt_at=1) == ExitCode.PREEMPTED, run.said
    lost = list((run.directory / "ram").glob("*/host-1*"))
    assert lost
    for directory in lost:
        shutil.rmtree(directory)
    assert run.launch(sharded, *copies, preempt_at=1) == ExitCode.PREEMPTED, run.said
    shutil.rmtree(run.directory / "ram")
    assert run.launch(replicated, *copies, "--broadcast", "always") == ExitCode.OK, run.said
    resumed = check_preemptions(run, 2, ("ram", "peer", "durable"))
    *from_buddy, first, second = run.events(Kind.RESTORED)
    sources = {event.process: {tier for tier, size in event.fields["sources"].items() if size} for event in from_buddy}
    assert sources == {0: {"ram"}, 1: {"peer"}}
    read_bytes = sum(event.fields["sources"]["durable"] for event in (first, second))
    for event in (first, second):
        assert event.fields["broadcast"] is True, event.fields
        assert set(event.fields["sources"]) == {"durable", "replica"}
        assert sum(event.fields["sources"].values()) <= 1.01 * read_bytes, "each wants all of the state"
    expected, found = reference.taken(), run.taken()
    assert list(found) == list(expected) == list(range(STEPS))
    for step in expected:
        assert found[step][0] == expected[step][0], f"step {step} read other records"
        assert step >= resumed[-1] or found[step] == expected[step], f"step {step}: the same loss to the bit"


@pytest.mark.slow
def test_any_number_of_processes(tmp_path: Path, cache: Path) -> None:
    """Breaks when some number of processes cannot read what another one wrote: 4 -> 2 -> 3 -> 1 -> 4."""
    mesh = "data=3,fsdp=4"  # 12 devices divide among any of them
    shapes = [Shape(processes=n, devices=12 // n, mesh=mesh) for n in (4, 2, 3, 1, 4)]
    check_chain(tmp_path, cache, shapes, batch=12, steps=60)


@pytest.mark.slow
def test_any_mesh(tmp_path: Path, cache: Path) -> None:
    """Breaks when a layout cannot follow another: (data=2,fsdp=2) -> (data=1,fsdp=4) -> (model=4)."""
    meshes = ("data=2,fsdp=2", "data=1,fsdp=4", "model=4")
    check_chain(tmp_path, cache, [Shape(processes=2, devices=2, mesh=mesh) for mesh in meshes], batch=8, steps=STEPS)


@pytest.mark.slow
def test_the_fast_tiers_of_hosts_that_stay_are_used(tmp_path: Path, cache: Path) -> None:
    """Breaks when a job that comes back as it was reads the bucket for what its memory holds."""
    shapes = [Shape(processes=2, devices=2, mesh="data=2,fsdp=2")] * 2
    _, run = check_chain(tmp_path, cache, shapes, batch=8, steps=30, wipe=False)
    assert {tier for event in run.events(Kind.RESTORED) for tier in event.fields["sources"]} == {"ram"}
