"""InstaDeep's mlip: its training loop of a small MACE force field. Its `ocp.CheckpointManager` is ckptkit's.

Run: `python mlip_train.py ROOT [--kill-after EPOCH] [--stock]`
"""

from __future__ import annotations

from typing import Any

import ase  # pyright: ignore[reportMissingImports]
import jax
import numpy as np
import optax
from ase.calculators.singlepoint import SinglePointCalculator  # pyright: ignore[reportMissingImports]

from tests.strangers.reporting import Run

EPOCHS = 5


def molecules(count: int) -> list[Any]:
    """Bent water molecules with made-up energies and forces."""
    draw = np.random.default_rng(count)
    found = []
    for _ in range(count):
        atoms = ase.Atoms("OHH", [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]] + 0.1 * draw.normal(size=(3, 3)))
        atoms.calc = SinglePointCalculator(atoms, energy=draw.normal(), forces=draw.normal(size=(3, 3)))
        found.append(atoms)
    return found


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last epoch."""
    # It imports Orbax's classes by name, so that they are replaced first.
    from mlip.data import ASEAtomsReader, GraphDatasetBuilder  # pyright: ignore[reportMissingImports]
    from mlip.models import ForceField, Mace  # pyright: ignore[reportMissingImports]
    from mlip.models.loss import MSELoss  # pyright: ignore[reportMissingImports]
    from mlip.training import TrainingIOHandler, TrainingLoop  # pyright: ignore[reportMissingImports]

    readers = {"train": ASEAtomsReader(molecules(8)), "valid": ASEAtomsReader(molecules(2))}
    builder = GraphDatasetBuilder(readers, GraphDatasetBuilder.Config(graph_cutoff_angstrom=3.0, batch_size=4))
    data = builder.get_datasets()
    config = Mace.Config(num_channels=4, num_layers=1, l_max=1, correlation=1, readout_irreps=("4x0e", "0e"))
    field = ForceField.from_mlip_network(Mace(config, builder.dataset_info))
    settings: Any = {"restore_checkpoint_if_exists": True, "restore_optimizer_state": True}
    handler = TrainingIOHandler(TrainingIOHandler.Config(checkpoint_dir=run.root / "steps", **settings))
    loop = TrainingLoop(
        *(data["train"], data["valid"], field, MSELoss(), run.notebook.slow(optax.adamw(1e-2))),
        TrainingLoop.Config(num_epochs=EPOCHS),
        io_handler=handler,
    )
    first = loop.epoch_number
    handler.attach_logger(lambda category, logged, epoch: run.reached(epoch - 1))
    loop.run()
    run.report(first, jax.tree.leaves(loop.training_state))


if __name__ == "__main__":
    main(Run.from_arguments())
