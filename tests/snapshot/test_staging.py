"""Saves between donating steps: whatever the strategy, what is restored is what was there when `save` was called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptkit
from tests.states import assert_same, make_state, put


@jax.jit
def gradient(state: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 0 + 1, state)


update = jax.jit(lambda state, by: jax.tree.map(jnp.add, state, by), donate_argnums=0)
step_whole = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)


def begin_state() -> Any:
    return {
        "w": put(np.zeros((256, 64), np.float32), "data", "fsdp"),
        "b": put(np.zeros(8, np.int32)),
        "h": put(np.zeros(16, np.float16), "fsdp"),
    }


@pytest.mark.parametrize("strategy", ["auto", "slot_copy", "device_copy", "pinned_host", "block"])
@settings(deadline=None, max_examples=8)
@given(actions=st.lists(st.sampled_from(["whole", "split", "save"]), min_size=4, max_size=14))
def test_every_restored_step_is_exact(tmp_path_factory: Any, strategy: Any, actions: list[str]) -> None:
    """A checkpoint would hold parts of two steps, or a save would fail with 'Array has been deleted'."""
    root: Path = tmp_path_factory.mktemp("run")
    state, count = begin_state(), 0
    tiers = [ckptkit.Tier.ram(str(root / "ram"), slots=4)]
    options = ocp.CheckpointManagerOptions(save_interval_steps=10**6)
    with ckptkit.CheckpointManager(
        root / "d", options=options, tiers=tiers, saving=ckptkit.SaveOptions(staging=strategy)
    ) as manager:
        for number, action in enumerate(actions):
            if action == "save":
                manager.save(number * 100 + count, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
                continue
            state = step_whole(state) if action == "whole" else update(state, gradient(state))
            count += 1
        manager.wait_until_finished()
        for saved in manager.all_steps():
            for leaf in jax.tree.leaves(manager.restore(saved)):
                assert (np.asarray(leaf) == saved % 100).all()


def test_event_reports_the_strategy_and_its_reason(tmp_path: Path) -> None:
    """Nobody could tell why a save stalls, or that a forced strategy was not taken."""
    log, events = ckptkit.EventLog(), []
    log.observe(events.append)
    for strategy in ("auto", "device_copy"):
        with ckptkit.CheckpointManager(
            tmp_path / strategy, saving=ckptkit.SaveOptions(staging=strategy), events=log
        ) as manager:
            manager.save(1, args=ocp.args.StandardSave(make_state(1)))  # pyright: ignore[reportCallIssue]
    said = [event.fields for event in events if event.kind == ckptkit.Kind.STAGED]
    assert [(each["strategy"], each["reason"]) for each in said] == [
        ("slot_copy", "on the CPU backend one copy straight into the slot is the floor"),
        ("device_copy", "asked for"),
    ]


def test_device_copy_supports_all_leaf_kinds(tmp_path: Path) -> None:
    """Keys, booleans or host arrays would be lost on the way that accelerators take."""
    with ckptkit.CheckpointManager(tmp_path, saving=ckptkit.SaveOptions(staging="device_copy")) as manager:
        state = make_state(5)
        manager.save(5, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        state["host"] += 1  # the caller may change what is on the host as soon as `save` returns
        manager.wait_until_finished()
        assert_same(manager.restore(5), make_state(5))


def test_donated_state_raises_and_step_can_be_saved_again(tmp_path: Path) -> None:
    """The second try, with the right arrays, would be taken for a step that is saved already: no save, and no error."""
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), slots=2)]
    with ckptkit.CheckpointManager(tmp_path / "d", tiers=tiers) as manager:
        for step in range(3):  # every slot has been used
            state = {"w": jnp.arange(5.0) + step, "key": jax.random.key(step)}
            gone = jax.tree.map(jnp.copy, state)
            gone["w"].delete()
            with pytest.raises(RuntimeError, match="deleted"):
                manager.save(step, args=ocp.args.StandardSave(gone))  # pyright: ignore[reportCallIssue]
            assert manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
            assert manager.all_steps()[-1] == step
            assert_same(manager.restore(step), state)


@pytest.mark.long
def test_a_device_copy_does_not_wait_for_the_step_in_flight(tmp_path: Path) -> None:
    """A save would hold the loop for a whole step, on every accelerator."""

    @jax.jit
    def long_step(state: Any) -> Any:
        return jax.lax.fori_loop(0, 400, lambda _, w: w @ w / 1000, state)

    state = {"w": jnp.ones((700, 700))}
    long_step(state["w"]).block_until_ready()
    with ckptkit.CheckpointManager(tmp_path, saving=ckptkit.SaveOptions(staging="device_copy")) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        state = {"w": long_step(state["w"])}
        manager.save(1, args=ocp.args.StandardSave(state), force=True)  # pyright: ignore[reportCallIssue]
        assert not state["w"].is_ready()
        manager.wait_until_finished()
        assert_same(manager.restore(1), state)


def test_unknown_strategy_is_refused(tmp_path: Path) -> None:
    """A typing error would choose another strategy without a message."""
    with pytest.raises(
        ValueError, match=r"staging 'copy': give one of slot_copy, device_copy, pinned_host, block, auto"
    ):
        ckptkit.CheckpointManager(tmp_path, saving=ckptkit.SaveOptions(staging="copy"))  # pyright: ignore[reportArgumentType]
