"""The plan's numbers for a model that nobody allocates."""

import io

import pytest
from rich.console import Console

from trainer.config import InputError, MeshConfig, OptimizerConfig, preset
from trainer.plan import Plan, _abstract_mesh, _one_block, make_plan, print_plan, sharded_leaves
from trainer.sharding import named_leaves, shard_state
from trainer.step import abstract_train


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(
        preset("gpt3-175b").model,
        MeshConfig(data=8, model=8),
        microbatch_rows=1,
        device_bytes=80_000_000_000,
        devices_per_host=8,
    )


def test_gpt3_plan_matches_published_numbers(plan: Plan):
    """The plan would promise what the hardware cannot hold. 174.6e9 parameters: Brown et al. 2020."""
    assert plan.parameters == pytest.approx(174.6e9, rel=0.01)
    assert plan.checkpoint_bytes == pytest.approx(12 * plan.parameters, rel=1e-6)
    assert plan.memory.parameters == pytest.approx(4 * plan.parameters / 8, rel=1e-3)
    assert plan.memory.gradients == plan.memory.parameters
    assert plan.memory.optimizer == pytest.approx(2 * plan.memory.parameters, rel=1e-6)
    assert plan.host_bytes == pytest.approx(plan.checkpoint_bytes, rel=1e-3), "8-way model: a host holds it all"


def test_gpt3_plan_that_does_not_fit_suggests_a_mesh(plan: Plan):
    """A person would order the machines that it does not fit: f32 Adam over 8 model ways alone is above 80 GB."""
    assert not plan.fits
    assert plan.fitting is not None
    fsdp, memory = plan.fitting
    assert fsdp == 6  # 4 needs 87 GB before activations, 5 does not divide 12288
    assert memory.total <= 80e9


def test_plan_is_printed_with_sources_and_totals(plan: Plan):
    """The command would compute and not tell."""
    out = io.StringIO()
    print_plan(plan, keep=3, devices_per_host=8, console=Console(file=out, width=110))
    text = " ".join(out.getvalue().split())
    assert "blocks/*/attention/key_value" in text
    assert "arXiv:2205.05198" in text
    assert "The smallest fsdp that does is 6" in text
    assert "data=8,fsdp=6,model=8, 384 devices" in text
    assert "64 devices, hosts of 8 devices" in text
    assert "Not counted: a second copy of the gradients (87.29 GB)" in text
    assert "8,379.20 GB │ 3 steps kept and one being written" in text, "a bucket sized for three steps is full"


def test_replicated_leaves_are_not_gathered():
    """Norms would be counted once for each way of fsdp. By hand: 12 d^2 of a block, over model=8, in bfloat16."""
    plan = make_plan(
        preset("gpt3-175b").model,
        MeshConfig(fsdp=1536, model=8),
        microbatch_rows=1,
        device_bytes=80 * 10**9,
        devices_per_host=8,
    )
    assert plan.memory.gathered == 12 * 12288**2 // 8 * 2


@pytest.mark.parametrize("name", ["tiny", "25m"])
def test_plan_of_one_block_matches_the_whole_model(name: str):
    """The plan is made of one block: a model whose blocks differ would get numbers of another model."""
    model, mesh = preset(name).model, MeshConfig(fsdp=2)
    _, abstract = abstract_train(model, OptimizerConfig())
    whole = named_leaves(shard_state(abstract, _abstract_mesh(mesh)))
    planned = sharded_leaves(_one_block(model), model, mesh)
    assert sorted(planned) == sorted(whole)
    for path, leaf in whole.items():
        assert (planned[path].shape, planned[path].dtype) == (leaf.shape, leaf.dtype), path
        assert planned[path].sharding.spec == leaf.sharding.spec, path


def test_small_model_fits_on_eight_devices():
    """Every model would be refused, or every one accepted."""
    plan = make_plan(
        preset("125m").model, MeshConfig(fsdp=8), microbatch_rows=1, device_bytes=80 * 10**9, devices_per_host=4
    )
    assert plan.fits
    assert plan.parameters == pytest.approx(125e6, rel=0.05)
    assert plan.host_bytes < 0.51 * plan.checkpoint_bytes, "half of the boxes, and the small replicated leaves"


def test_no_mesh_fits_a_tiny_device():
    """The search would name an fsdp that does not fit, or not end."""
    plan = make_plan(preset("tiny").model, MeshConfig(), microbatch_rows=1, device_bytes=100_000, devices_per_host=8)
    assert not plan.fits
    assert plan.fitting is None


def test_offloaded_moments_are_counted_on_the_host():
    """A person would order machines whose host memory does not hold the moments, or more devices than are needed."""
    model, mesh = preset("gpt3-175b").model, MeshConfig(fsdp=2, model=8)
    sizes = {"microbatch_rows": 1, "device_bytes": 10**12, "devices_per_host": 8}
    here, there = (make_plan(model, mesh, offload=offload, **sizes) for offload in (False, True))
    assert here.offloaded_bytes == here.memory.offloaded == 0
    assert there.memory.offloaded == pytest.approx(2 * there.memory.parameters, rel=1e-6)
    assert there.offloaded_bytes == 8 * there.memory.offloaded
    largest = 2 * 4 * 12288 * 50304 // 16  # both moments of the embedding, over 16 devices
    counters = here.memory.optimizer - there.memory.offloaded
    assert there.memory.optimizer == counters + 2 * largest
    assert there.memory.total < here.memory.total
    assert there.checkpoint_bytes == here.checkpoint_bytes
    out = io.StringIO()
    print_plan(there, keep=3, devices_per_host=8, console=Console(file=out, width=110))
    text = " ".join(out.getvalue().split())
    assert "Offloaded moments take 698.41 GB of pinned memory on a host" in text


def test_mesh_that_does_not_divide_is_refused():
    """A plan would be made for a layout that the trainer refuses."""
    with pytest.raises(InputError, match="key_value: model=4 does not divide"):
        make_plan(preset("tiny").model, MeshConfig(model=4), microbatch_rows=1, device_bytes=10**9, devices_per_host=8)
