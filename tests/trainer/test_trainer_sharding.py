"""The rule check refuses layouts that train wrongly or waste devices."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from trainer.config import InputError, MeshConfig, OptimizerConfig, preset
from trainer.sharding import RULES, P, check_offload, check_rules, named_leaves
from trainer.step import abstract_train


@pytest.fixture(scope="module")
def params() -> dict[str, jax.ShapeDtypeStruct]:
    _, state = abstract_train(preset("tiny").model, OptimizerConfig())
    return named_leaves(state["model"])


def refusal(params, mesh: str, **options) -> str:
    with pytest.raises(InputError) as raised:
        check_rules(params, MeshConfig.parse(mesh), **{"global_batch": 8, **options})
    return str(raised.value)


def test_default_rules_pass_their_own_check(params):
    """Every run would be refused: the table must satisfy its own check."""
    for mesh in ("data=1", "fsdp=2,model=2", "data=2,model=2", "fsdp=4", "data=2,fsdp=2,model=2"):
        check_rules(params, MeshConfig.parse(mesh), global_batch=8)


def test_model_axis_in_the_batch_is_refused(params):
    """Devices that share a row would each see other rows, and their halves of a matmul would not fit together."""
    text = refusal(params, "model=2", batch_spec=P(("data", "model")))
    assert "batch: P(('data', 'model'),) splits rows over model" in text
    assert "split over data and fsdp" in text


def test_data_axis_in_a_weight_is_refused(params):
    """Replicas would hold different weights."""
    text = refusal(params, "data=2", rules=((r"mlp/down$", P("data", None)), *RULES))
    assert "blocks/*/mlp/down: P('data', None) splits it over data" in text
    assert "split over fsdp instead" in text


def test_idle_axis_is_refused(params):
    """Devices would silently repeat each other's work."""
    rules = tuple((pattern, P()) for pattern, _ in RULES)
    text = refusal(params, "model=2", rules=rules)
    assert "axis model: 2 devices, but it splits neither the batch nor a weight above 1 MB" in text
    assert "set model=1 or name model in a rule" in text


def test_axis_used_only_by_a_small_weight_is_refused(params):
    """An axis that splits only a norm scale would pass as used."""
    rules = ((r"norm/scale$", P("model")), *((pattern, P()) for pattern, _ in RULES))
    assert "axis model: 2 devices" in refusal(params, "model=2", rules=rules)


def test_spec_longer_than_rank_is_refused(params):
    """JAX would fail later, inside a compile, without naming the parameter."""
    text = refusal(params, "fsdp=2", rules=((r"norm/scale$", P(None, "fsdp")), *RULES))
    assert "blocks/*/attention_norm/scale: P(None, 'fsdp') names 2 dimensions, float32[128] has 1" in text


def test_undivided_dimension_is_refused(params):
    """A mesh that splits 2 kv heads over 4 devices must be refused by name, with what would do."""
    text = refusal(params, "model=4")
    assert (
        "blocks/*/attention/key_value: model=4 does not divide dimension 2 of float32[128,2,2,32]; "
        "choose a size that divides 2" in text
    )
    assert text.count("key_value") == 1, "the same fault of every block is reported once"


def test_undivided_batch_is_refused(params):
    """Some devices would get no rows."""
    text = refusal(params, "fsdp=2", global_batch=9)
    assert "data x fsdp" not in text
    assert re.search(r"need a multiple of 2 rows, --global-batch is 9; choose 8", text)


def test_parameter_without_rule_is_refused():
    """A new weight would be replicated without anybody having decided so."""
    text = refusal({"blocks/0/new": jax.ShapeDtypeStruct((4,), jnp.float32)}, "data=1")
    assert "blocks/*/new: no rule matches it; add one to RULES in trainer/sharding.py" in text


def test_all_faults_are_reported_at_once(params):
    """A person would mend one fault per attempt."""
    text = refusal(params, "model=8,fsdp=3")
    assert "mlp/up" in text
    assert "key_value" in text
    assert "batch:" in text


@pytest.mark.parametrize("text", ["fsdp", "tensor=2", "fsdp=two", "fsdp=2,fsdp=2", "data=0"])
def test_invalid_mesh_text_is_refused(text):
    """A mistyped --mesh would end in a traceback."""
    with pytest.raises(InputError, match="--mesh"):
        MeshConfig.parse(text)


def test_devices_without_pinned_host_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    """The first step would fail in the compiler, with a message of XLA."""
    check_offload()
    device = SimpleNamespace(device_kind="toaster", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(InputError, match="toaster has no pinned_host memory, only device"):
        check_offload()
