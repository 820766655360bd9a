"""MaxText: its pre-training of a small transformer on synthetic data, over ckptkit.

    python maxtext_train.py ROOT [--kill-after STEP] [--stock]

Its `orbax.checkpoint.v1.training.Checkpointer` is ckptkit's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # nothing is sent to a cloud

import jax
from orbax.checkpoint import v1 as orbax

from tests.strangers.reporting import Run

STEPS = 6
SMALL = [
    *("dataset_type=synthetic", "hardware=cpu", "skip_jax_distributed_system=true", "attention=dot_product"),
    *("vocab_size=128", "per_device_batch_size=1", "max_target_length=32", "base_emb_dim=32", "base_mlp_dim=64"),
    *("base_num_query_heads=2", "base_num_kv_heads=2", "base_num_decoder_layers=2", "head_dim=16"),
    *("enable_goodput_recording=false", "monitor_goodput=false"),
]


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last step; the bits are those of the last checkpoint."""
    # It imports Orbax's classes by name, so that they are replaced first.
    import maxtext  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]

    steps = run.root / "r" / "checkpoints"
    first = max((int(path.name) + 1 for path in steps.glob("[0-9]*")), default=0)
    settings = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
    saving = [f"base_output_directory={run.root}", "run_name=r", "enable_checkpointing=true", "checkpoint_period=1"]
    run.kill_once_committed()
    train.main([sys.argv[0], str(settings), *saving, f"steps={STEPS}", *SMALL])
    run.report(first, jax.tree.leaves(orbax.load(str(steps / str(STEPS - 1)), checkpointable_name="items")))


if __name__ == "__main__":
    main(Run.from_arguments())
