"""The plan of a surgery: every leaf has exactly one origin that a rule names, or all differences are reported."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.surgery import Cast, Init, Rename, Rule, Skip, SurgeryError, Take, plan_surgery

STORED = {
    "body": {"0": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}, "1": {"kernel": jnp.zeros((3, 3))}},
    "head": {"kernel": jnp.zeros((3, 5))},
    "key": jax.random.key(0),
}


def moves(stored: Any, target: Any, *rules: Rule) -> dict[str, str | None]:
    return {origin.target: origin.source for origin in plan_surgery(stored, target, rules).origins}


def test_plan_with_a_new_head_and_a_renamed_body() -> None:
    """The commonest surgery."""
    target = {"trunk": STORED["body"], "head": {"kernel": jnp.zeros((3, 7))}, "key": STORED["key"]}
    plan = plan_surgery(STORED, target, [Skip("head.**"), Init("head.**"), Rename("body.**", "trunk.**"), Take("**")])
    assert {origin.target: origin.source for origin in plan.taken} == {
        "trunk.0.kernel": "body.0.kernel",
        "trunk.0.bias": "body.0.bias",
        "trunk.1.kernel": "body.1.kernel",
        "key": "key",
    }
    assert [origin.target for origin in plan.initialised] == ["head.kernel"]
    assert plan.skipped == ("head.kernel",)
    assert str(plan).splitlines() == [
        "initialised  head.kernel float32[3,7]",
        "taken        key key<fry>[]",
        "taken        trunk.0.bias float32[3] from body.0.bias",
        "taken        trunk.0.kernel float32[2,3] from body.0.kernel",
        "taken        trunk.1.kernel float32[3,3] from body.1.kernel",
        "skipped      head.kernel",
    ]
    assert json.loads(json.dumps(plan.to_json()))["initialised"] == ["head.kernel"]


def test_leaves_covered_by_no_rule_are_refused() -> None:
    """A typing error in a name would train a model on random weights."""
    target = {"trunk": STORED["body"], "head": STORED["head"], "key": STORED["key"]}
    with pytest.raises(SurgeryError) as caught:
        plan_surgery(STORED, target, [Take("head.*")])
    assert caught.value.differences == (
        "key key<fry>[] of the new model is covered by no rule: nothing goes there, no Init matches it",
        "stored body.0.bias float32[3] is covered by no rule: take, rename or skip it",
        "stored body.0.kernel float32[2,3] is covered by no rule: take, rename or skip it",
        "stored body.1.kernel float32[3,3] is covered by no rule: take, rename or skip it",
        "stored key key<fry>[] is covered by no rule: take, rename or skip it",
        "trunk.0.bias float32[3] of the new model is covered by no rule: nothing goes there, no Init matches it",
        "trunk.0.kernel float32[2,3] of the new model is covered by no rule: nothing goes there, no Init matches it",
        "trunk.1.kernel float32[3,3] of the new model is covered by no rule: nothing goes there, no Init matches it",
    )
    assert all(line in str(caught.value) for line in caught.value.differences)


@pytest.mark.parametrize(
    ("stored", "target", "rules", "said"),
    [
        ({"a": jnp.zeros(2)}, {"b": jnp.zeros(2)}, [Take("*"), Init("*")], "stored a float32[2] goes to a by"),
        (
            {"a": jnp.zeros(2), "b": jnp.zeros(2)},
            {"c": jnp.zeros(2)},
            [Rename("a|b", "c", regex=True)],
            "filled by 2 stored leaves: a, b",
        ),
        ({"a": jnp.zeros(2)}, {"a": jnp.zeros(2)}, [Take("a"), Init("a")], "taken from a and initialised by"),
        ({"a": jnp.zeros(2)}, {"a": jnp.zeros(3)}, [Take("a")], "a is float32[3] in the new model, float32[2] in"),
        ({"a": jnp.zeros(2)}, {"a": jnp.zeros(2, jnp.bfloat16)}, [Take("a")], "add Cast('a')"),
        ({"a": jax.random.key(0)}, {"a": jnp.zeros(())}, [Take("a"), Cast("a")], "keys cannot be cast"),
        (
            {"a": jnp.zeros(2, jnp.complex64)},
            {"a": jnp.zeros(2)},
            [Take("a"), Cast("a")],
            "a is float32[2] in the new model, complex64[2] in the checkpoint: a cast would drop the imaginary part",
        ),
        ({"a": jnp.zeros((), jnp.complex64)}, {"a": 0.0}, [Take("a"), Cast("a")], "would drop the imaginary part"),
        ({}, {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}, [Init("a")], "has no value to be initialised with"),
    ],
)
def test_impossible_plan_is_refused(stored: Any, target: Any, rules: list[Rule], said: str) -> None:
    """It would be done in some way."""
    with pytest.raises(SurgeryError) as caught:
        plan_surgery(stored, target, rules)
    assert said in str(caught.value)


def test_plan_lists_casts() -> None:
    """Precision would be lost without a trace."""
    target = {"a": jnp.zeros(2, jnp.bfloat16)}
    plan = plan_surgery({"a": jnp.zeros(2)}, target, [Take("**"), Cast("a"), Skip("optimizer.**")])
    assert str(plan).splitlines() == [
        "taken        a bfloat16[2] cast from float32",
        "no leaf for  Skip(pattern='optimizer.**')",
    ]


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        (Rename("enc.**", "backbone.enc.**"), "enc.0.w", "backbone.enc.0.w"),
        (Rename("**.attn.*", "**.attention.*"), "layers.3.attn.q", "layers.3.attention.q"),
        (Rename("**.attn.*", "**.attention.*"), "attn.q", "attention.q"),
        (Rename("layer_?.w", "layers.?.w"), "layer_7.w", "layers.7.w"),
        (Rename("layer_?.w", "layers.?.w"), "layer_17.w", None),
        (Rename(r"layer_(\d+)\.(.*)", r"layers.\1.\2", regex=True), "layer_17.w.b", "layers.17.w.b"),
        (Rename("a.w", "b.w"), "aXw", None),
        (Take("*"), "a.b", None),
        (Take("a.**"), "a", None),
        (Take("**.kernel"), "a.b.kernel", "a.b.kernel"),
        (Take("**.kernel"), "kernel", "kernel"),
        (Take("**.kernel"), "my_kernel", None),
    ],
)
def test_patterns_match_and_rename(rule: Take | Rename, name: str, expected: str | None) -> None:
    """A weight would land in another layer."""
    assert rule.target_of(name) == expected


def test_invalid_rename_is_refused() -> None:
    """It would raise in the middle of a plan, or fill in nothing."""
    with pytest.raises(ValueError, match="the wildcards of 'b'"):
        Rename("a.*", "b")
    with pytest.raises(ValueError, match="not a regular expression"):
        Rename("(", "b", regex=True)


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join), unique=True, max_size=12))
def test_rename_and_its_reverse_are_the_identity(names: list[str]) -> None:
    """A leaf that was renamed there could not be renamed back."""
    there, back = Rename("a.**", "z.a.**"), Rename("z.a.**", "a.**")
    for name in names:
        moved = there.target_of(name)
        assert (moved is None) == (not name.startswith("a."))
        assert moved is None or back.target_of(moved) == name
