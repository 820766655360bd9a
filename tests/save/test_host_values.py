"""Values in host memory that differ by process: a warning at the save."""

from __future__ import annotations

import logging
from pathlib import Path

from ckptkit.save.agreement.replica_check import differing_host_values
from tests.multiprocess.together import run_together

WARNING = "step 1: values in host memory (NumPy arrays, Python numbers, JSON) of item"


def test_first_process_that_differs_is_found() -> None:
    ballots = [{"host": {"a": "0", "b": "1"}}, None, {"host": {"a": "0", "b": "2"}}, {"host": {"a": "3", "b": "2"}}]
    assert differing_host_values(ballots) == {"a": 3, "b": 2}
    assert differing_host_values([None, *ballots[1:]]) == {}
    assert differing_host_values([{}, {}]) == {}


def test_save_warns_of_items_that_differ_by_process(tmp_path: Path) -> None:
    output = run_together("tests.save.test_host_values", 2, str(tmp_path), devices=1)
    warned = [line for line in output[0].splitlines() if WARNING in line]
    assert sorted(line.split("of item ")[1].split()[0] for line in warned) == ["'json'", "'state'"], output[0]
    assert WARNING not in output[1]


def job(process: int, port: str, root: Path) -> None:
    """One of two processes: the items `same` and `arrays` are equal, the others are not. Saves twice."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    import ckptkit

    jax.distributed.initialize(f"localhost:{port}", 2, process)
    with ckptkit.CheckpointManager(
        root / "root",
        options=ocp.CheckpointManagerOptions(save_interval_steps=100),
        tiers=[ckptkit.Tier.ram(str(root / "ram"), save=ckptkit.EverySteps(1))],
        host_id="host",
    ) as manager:
        for step in (1, 2):
            args = ocp.args.Composite(
                state=ocp.args.StandardSave({"numpy": np.full(3, process), "n": 1}),  # pyright: ignore[reportCallIssue]
                same=ocp.args.StandardSave({"numpy": np.full(3, step)}),  # pyright: ignore[reportCallIssue]
                json=ocp.args.JsonSave({"process": process}),  # pyright: ignore[reportCallIssue]
                text=ocp.args.JsonSave({"step": step}),  # pyright: ignore[reportCallIssue]
            )
            assert manager.save(step, args=args)
            manager.wait_until_finished()


if __name__ == "__main__":
    import sys

    logging.basicConfig(level=logging.WARNING)
    job(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
