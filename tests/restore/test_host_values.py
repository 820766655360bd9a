"""Values in host memory that the processes saved differently: all get back those of process 0, from every tier."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.together import run_together

TIERS = ("ram", "ssd", "durable")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The items that each process of one job restored, by tier and order of the hosts."""
    output = run_together("tests.restore.test_host_values", 2, str(tmp_path_factory.mktemp("job")), devices=1)
    lines = [[line for line in each.splitlines() if line.startswith("{")] for each in output]
    assert all(len(each) == 1 for each in lines), output
    return [json.loads(each[0]) for each in lines]


@pytest.mark.parametrize("hosts", ["same hosts", "swapped hosts"])
@pytest.mark.parametrize("tier", TIERS)
def test_all_processes_get_what_process_0_saved(outputs: list[dict[str, Any]], tier: str, hosts: str) -> None:
    """Each process would continue from its own value, or that of the other after its host was replaced."""
    for found in outputs:
        values = found[f"{tier}, {hosts}"]
        assert values == {
            "numpy": [0.0] * 3,
            "n": 0,
            "placed": [0.0] * 4,
            "json": {"process": 0},
            "equal": {"seven": 7},
        }, found


@pytest.mark.parametrize("hosts", ["same hosts", "swapped hosts"])
def test_large_values_stay_those_of_the_share_at_hand(outputs: list[dict[str, Any]], hosts: str) -> None:
    """A buffer of gigabytes would be sent through the coordination service."""
    swapped = hosts == "swapped hosts"
    assert [found[f"large, {hosts}"] for found in outputs] == ([1, 0] if swapped else [0, 1])
    assert "or have more than" in outputs[0]["warnings"]
    assert "or have more than" not in outputs[1]["warnings"], "one warning for the job"


def job(process: int, port: str, root: Path) -> None:
    """One of two processes, each a host of its own."""
    import jax
    import orbax.checkpoint as ocp

    import ckptkit
    from ckptkit.restore import host_values

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("ckptkit").addHandler(handler)
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def manager(tier: str, host: int, durable: str) -> ckptkit.CheckpointManager:
        made = {"ram": ckptkit.Tier.ram, "ssd": ckptkit.Tier.ssd}
        tiers = [made[tier](str(root / tier), save=ckptkit.EverySteps(1))] if tier in made else []
        options = ocp.CheckpointManagerOptions(save_interval_steps=1 if tier == "durable" else 100)
        return ckptkit.CheckpointManager(root / durable, options=options, tiers=tiers, host_id=f"host{host}")

    def saved() -> Any:
        tree = {"numpy": np.full(3, process, float), "n": process, "placed": np.full(4, process, np.float32)}
        return ocp.args.Composite(
            state=ocp.args.StandardSave(tree),  # pyright: ignore[reportCallIssue]
            json=ocp.args.JsonSave({"process": process}),  # pyright: ignore[reportCallIssue]
            equal=ocp.args.JsonSave({"seven": 7}),  # pyright: ignore[reportCallIssue]
        )

    wanted = ocp.args.Composite(
        state=ocp.args.StandardRestore(  # pyright: ignore[reportCallIssue]
            {"numpy": np.zeros(3), "n": 0, "placed": jax.ShapeDtypeStruct((4,), np.float32, sharding=everywhere)}
        ),
        json=ocp.args.JsonRestore(),
        equal=ocp.args.JsonRestore(),
    )
    found: dict[str, Any] = {}
    for tier in TIERS:
        with manager(tier, process, tier) as saving:
            assert saving.save(1, args=saved())
        for hosts, host in (("same hosts", process), ("swapped hosts", 1 - process)):
            with manager(tier, host, tier) as restoring:
                items = restoring.restore(1, args=wanted)
            values = {**items["state"], "json": items["json"], "equal": items["equal"]}
            arrays = {k: np.asarray(v).tolist() for k, v in values.items() if k in ("numpy", "placed")}
            found[f"{tier}, {hosts}"] = values | arrays
    host_values.BYTES_MAX = 1 << 10
    with manager("ram", process, "large") as saving:
        assert saving.save(1, args=ocp.args.StandardSave({"large": np.full(1 << 10, process)}))  # pyright: ignore[reportCallIssue]
    warnings.clear()
    for hosts, host in (("same hosts", process), ("swapped hosts", 1 - process)):
        with manager("ram", host, "large") as restoring:
            found[f"large, {hosts}"] = int(restoring.restore(1)["large"][0])
    print(json.dumps(found | {"warnings": " ".join(warnings)}), flush=True)


if __name__ == "__main__":
    import sys

    job(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
