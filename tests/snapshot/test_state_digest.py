"""One digest for a state: equal for equal bits, different for any other bit, shape, type or name."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckptkit


def state() -> dict[str, object]:
    return {"w": jnp.arange(12.0).reshape(3, 4), "key": jax.random.key(3), "host": np.arange(3), "step": 7}


def test_equal_states_have_equal_digests() -> None:
    """Two runs that end alike would be called different."""
    assert ckptkit.state_digest(state()) == ckptkit.state_digest(state())
    assert len(ckptkit.state_digest(state())) == 32


@pytest.mark.parametrize(
    "change",
    [
        {"w": jnp.arange(12.0).reshape(3, 4).at[2, 3].set(11.000001)},
        {"w": jnp.arange(12.0).reshape(4, 3)},
        {"w": jnp.arange(12, dtype=jnp.float16).reshape(3, 4)},
        {"key": jax.random.key(4)},
        {"host": np.arange(3)[::-1]},
        {"step": 8},
        {"other": jnp.zeros(1)},
    ],
    ids=str,
)
def test_any_change_changes_the_digest(change: dict[str, object]) -> None:
    """A run that resumed wrongly would pass for the undisturbed one."""
    assert ckptkit.state_digest({**state(), **change}) != ckptkit.state_digest(state())


def test_digest_is_written_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ckptkit chaos` would have nothing to compare."""
    monkeypatch.setenv("CKPTKIT_STATE_DIGEST", f"{tmp_path}/told-{{process}}")
    assert ckptkit.state_digest(state()) == (tmp_path / "told-0").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["told-0"]
