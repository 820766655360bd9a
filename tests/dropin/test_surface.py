"""Orbax's v0 surface as it is installed: every method, argument, option and field of an argument has a rule here."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler import BasePyTreeCheckpointHandler
from orbax.checkpoint._src.metadata.tree import PyTreeMetadataOptions

import ckptkit
from ckptkit.durable.orbax.manager import StockManager
from ckptkit.restore.request import _gives_back_tree
from ckptkit.snapshot.items import save_items
from ckptkit.snapshot.small_items import gives_back
from tests.dropin import test_options


class OwnImplementation(BasePyTreeCheckpointHandler):
    """A caller's own way to write trees."""


args: Any = ocp.args
DEPARTURES = (Path(__file__).parents[2] / "docs" / "departures.md").read_text()
on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
tree = {"w": jnp.arange(4.0)}
# Each field of each argument of an item. held: by every tier, as the tests of the items show; orbax: the argument here
# makes Orbax write or read the item, from the durable tier alone; departure: no effect, as listed in
# docs/departures.md; unused: Orbax does not use it either.
ITEM_RULES: dict[str, Any] = {
    "StandardSave.item": "held",
    "StandardSave.save_args": "held",
    "StandardSave.custom_metadata": "held",
    "StandardRestore.item": "held",
    "StandardRestore.strict": args.StandardRestore(tree, strict=False),
    "StandardRestore.support_layout": args.StandardRestore(tree, support_layout=True),
    "StandardRestore.fallback_sharding": args.StandardRestore(tree, fallback_sharding=on),
    "PyTreeSave.item": "held",
    "PyTreeSave.save_args": "held",
    "PyTreeSave.custom_metadata": "held",
    "PyTreeSave.ocdbt_target_data_file_size": "held",
    "PyTreeRestore.item": "held",
    "PyTreeRestore.restore_args": "held",
    "PyTreeRestore.partial_restore": "held",
    "PyTreeRestore.transforms": args.PyTreeRestore(tree, transforms={}),
    "PyTreeRestore.transforms_default_to_original": "held",  # rules `transforms`
    "PyTreeRestore.legacy_transform_fn": args.PyTreeRestore(tree, legacy_transform_fn=lambda *_: None),
    "JsonSave.item": "held",
    "JsonRestore.item": "unused",
    "ArraySave.item": "held",
    "ArraySave.save_args": args.ArraySave(tree["w"], save_args=ocp.SaveArgs()),
    "ArrayRestore.item": "unused",
    "ArrayRestore.restore_args": args.ArrayRestore(restore_args=ocp.ArrayRestoreArgs(sharding=on)),
    "JaxRandomKeySave.item": "held",
    "JaxRandomKeySave.save_args": args.JaxRandomKeySave(jax.random.key(0), save_args=ocp.SaveArgs()),
    "JaxRandomKeyRestore.restore_args": args.JaxRandomKeyRestore(restore_args=ocp.ArrayRestoreArgs(sharding=on)),
    "NumpyRandomKeySave.item": "held",
    "ProtoSave.item": args.ProtoSave(object()),
    "ProtoRestore.item": args.ProtoRestore(object),
}
LEAF_RULES: dict[str, Any] = {
    "SaveArgs.aggregate": "departure",
    "SaveArgs.chunk_byte_size": "held",
    "SaveArgs.dtype": "held",
    "SaveArgs.shard_axes": "departure",
    "RestoreArgs.restore_type": "held",
    "RestoreArgs.dtype": "held",
    "ArrayRestoreArgs.restore_type": "held",
    "ArrayRestoreArgs.dtype": "held",
    "ArrayRestoreArgs.mesh": "held",
    "ArrayRestoreArgs.mesh_axes": "held",
    "ArrayRestoreArgs.sharding": "held",
    "ArrayRestoreArgs.global_shape": "held",
    "ArrayRestoreArgs.shape": "held",
    "ArrayRestoreArgs.strict": args.PyTreeRestore(tree, restore_args={"w": ocp.ArrayRestoreArgs(strict=False)}),
}
# Each argument of the handlers of trees. layout: the handler itself writes the durable tier, where this value is given;
# departure: no effect, as listed.
HANDLER_RULES: dict[str, Any] = {
    "use_ocdbt": False,
    "use_zarr3": True,
    "type_handler_registry": ocp.type_handlers.create_type_handler_registry(
        (int, ocp.type_handlers.ScalarHandler()), (jax.Array, ocp.type_handlers.ArrayHandler())
    ),
    "handler_impl": OwnImplementation(),
    "multiprocessing_options": ocp.options.MultiprocessingOptions(primary_host=None),
    "pytree_metadata_options": PyTreeMetadataOptions(support_rich_types=True),
    "aggregate_filename": "departure",
    "array_metadata_validator": "departure",
    "enable_pinned_host_transfer": "departure",
    "is_prioritized_key_fn": "departure",
    "memory_limit_options": "departure",
    "restore_concurrent_gb": "departure",
    "save_concurrent_gb": "departure",
    "save_device_host_concurrent_gb": "departure",
    "use_compression": "departure",
}
# Each field of the records within the options: the test that shows that it is obeyed, or departure.
RECORD_RULES = {
    "AsyncOptions.barrier_sync_fn": "departure",
    "AsyncOptions.create_directories_asynchronously": "departure",
    "AsyncOptions.post_finalization_callback": "test_async_options_callback_is_called",
    "AsyncOptions.timeout_secs": "departure",
    "AtomicityOptions.allow_legacy_atomic_rename": "test_atomicity_options_require_the_commit_file",
    "AtomicityOptions.mode": "test_atomicity_options_require_the_commit_file",
    "FileOptions.path_permission_mode": "test_file_options_set_permissions",
    "FileOptions.skip_sync_file_validations": "departure",
    "MultiprocessingOptions.active_processes": "departure",
    "MultiprocessingOptions.barrier_sync_key_prefix": "test_multiprocessing_options_separate_barriers",
    "MultiprocessingOptions.primary_host": "departure",
}
KINDS = {"ArrayRestore": "array", "JaxRandomKeyRestore": "jax_key", "ProtoRestore": "proto"}


def parameters(method: Any) -> dict[str, tuple[Any, Any]]:
    return {each.name: (each.kind, each.default) for each in inspect.signature(method).parameters.values()}


def test_every_method_takes_the_arguments_of_orbax() -> None:
    """A call would raise TypeError, or mean something else."""
    names = [name for name in dir(ocp.CheckpointManager) if not name.startswith("_")]
    assert len(names) > 15
    for name in ["__init__", "__enter__", "__exit__", *names]:
        theirs, found = getattr(ocp.CheckpointManager, name), getattr(ckptkit.CheckpointManager, name)
        if not callable(theirs):
            assert isinstance(found, property), name
        elif name != "__exit__":
            given = parameters(found)
            assert {each: given.get(each) for each in parameters(theirs)} == parameters(theirs), name
            assert list(given)[: len(parameters(theirs))] == list(parameters(theirs)), f"{name}: the order differs"


def test_every_field_of_every_argument_has_a_rule() -> None:
    """A field of a newer Orbax would be ignored."""
    kinds = [kind for kind in vars(ocp.args).values() if inspect.isclass(kind)]
    found = {
        f"{name}.{field.name}"
        for name, kind in vars(ocp.args).items()
        if inspect.isclass(kind) and dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }
    assert found == set(ITEM_RULES)
    assert len(kinds) == len({name.partition(".")[0] for name in ITEM_RULES}) + 3, (
        "CheckpointArgs, Composite and NumpyRandomKeyRestore have no field"
    )
    leaves = (ocp.SaveArgs, ocp.RestoreArgs, ocp.ArrayRestoreArgs)
    assert {f"{kind.__name__}.{field.name}" for kind in leaves for field in dataclasses.fields(kind)} == set(LEAF_RULES)


@pytest.mark.parametrize("field", [name for name, rule in (ITEM_RULES | LEAF_RULES).items() if rule == "departure"])
def test_field_without_effect_is_listed_as_departure(field: str) -> None:
    """A caller would set it, and get no message that it has no effect."""
    kind, _, name = field.partition(".")
    rows = [row for row in DEPARTURES.splitlines() if f"`{name}`" in row or f"`{kind}({name})`" in row]
    assert any("not used" in row for row in rows)


@pytest.mark.parametrize("field", [n for n, r in (ITEM_RULES | LEAF_RULES).items() if not isinstance(r, str)])
def test_field_that_only_orbax_obeys_is_left_to_orbax(field: str) -> None:
    """A fast tier would give something else than what was asked for."""
    given = (ITEM_RULES | LEAF_RULES)[field]
    kind = field.partition(".")[0]
    if kind.endswith("Save"):
        assert save_items({"item": given}) == "item"
    elif kind in KINDS:
        assert not gives_back(KINDS[kind], given)
    else:
        assert not _gives_back_tree(given)
        plain = dataclasses.replace(
            given, **{name: value for name, value in _defaults(given).items() if name != "item"}
        )
        assert _gives_back_tree(plain), "the field is the reason"


def _defaults(given: Any) -> dict[str, Any]:
    return {
        field.name: field.default for field in dataclasses.fields(given) if field.default is not dataclasses.MISSING
    }


@pytest.mark.parametrize("kind", ["Standard", "PyTree"])
def test_save_fields_are_held_by_the_ramdisk(tmp_path: Path, kind: str) -> None:
    """Another dtype would be restored, or metadata be lost, where the durable tier has no such step."""
    save, restore = getattr(args, f"{kind}Save"), getattr(args, f"{kind}Restore")
    wish = {"w": ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16))}
    options = ocp.CheckpointManagerOptions(save_interval_steps=100)
    with ckptkit.CheckpointManager(
        tmp_path / "run", options=options, tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]
    ) as manager:
        for step in (0, 1):
            assert manager.save(step, args=save(tree, save_args=wish, custom_metadata={"a": step}))
            manager.wait_until_finished()
        assert manager.steps()[-1].tiers == ("ram",)
        assert manager.restore(1, args=restore())["w"].dtype == jnp.bfloat16
        assert manager.restore(0, args=restore())["w"].dtype == jnp.bfloat16
        assert manager.item_metadata(0).custom_metadata == {"a": 0}


@pytest.mark.parametrize("kind", [ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler])
def test_every_argument_of_a_handler_has_a_rule(kind: Any) -> None:
    """A layout would be asked for, and another one written."""
    taken = {name for name in parameters(kind.__init__) if name != "self"}
    assert taken <= set(HANDLER_RULES)
    assert kind is ocp.StandardCheckpointHandler or taken == set(HANDLER_RULES)
    assert StockManager.is_plain(kind())
    for name in taken:
        if HANDLER_RULES[name] == "departure":
            assert any(f"`{name}`" in row and "not used" in row for row in DEPARTURES.splitlines()), name
        else:
            assert not StockManager.is_plain(kind(**{name: HANDLER_RULES[name]})), name
            assert f"`{name}" in DEPARTURES or name == "multiprocessing_options"


def test_every_field_of_the_records_in_the_options_has_a_rule() -> None:
    """A timeout, a permission or a barrier of the caller's own would be ignored."""
    records = [
        ocp.AsyncOptions,
        *(getattr(ocp.options, f"{n}Options") for n in ("Atomicity", "File", "Multiprocessing")),
    ]
    found = {f"{kind.__name__}.{field.name}" for kind in records for field in dataclasses.fields(kind)}
    assert found == set(RECORD_RULES)
    for field, rule in RECORD_RULES.items():
        name = field.partition(".")[2]
        if rule == "departure":
            assert re.search(rf"`(\w+\.)?{name}(=\w+)?`", DEPARTURES), f"{field} is not listed"
        else:
            assert callable(getattr(test_options, rule)), rule


def test_departures_count_the_options() -> None:
    """An option of a newer Orbax would be claimed, and not looked at."""
    assert f"All {len(dataclasses.fields(ocp.CheckpointManagerOptions))} fields rule the durable tier" in DEPARTURES
