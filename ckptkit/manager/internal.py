"""What the library's own front ends, Orbax v1's words and surgery, ask of a manager beside what its users do."""

from __future__ import annotations

from typing import Any, final

from ckptkit.manager.build import Components
from ckptkit.manager.catalog import Catalog
from ckptkit.manager.restore import Resumer
from ckptkit.restore.request import Choose, RestoreRequest
from ckptkit.restore.restorer import Restored


@final
class Internal:
    """One manager, from inside."""

    def __init__(self, components: Components, catalog: Catalog, resumer: Resumer):
        self._components = components
        self._catalog = catalog
        self._resumer = resumer

    def step_times(self) -> dict[int, int]:
        """When each step was committed, in nanoseconds of the wall clock, where that is known without reading."""
        return self._catalog.times_ns()

    def known_metrics(self, step: int) -> Any:
        """The metrics of a step as far as they are known without reading; None for none."""
        return self._components.history.metadata_index.cached_metrics(step)

    def forget_in_fast_tiers(self, step: int) -> None:
        """Leaves a step to the durable tier alone: what fast tiers hold of it is not what it is any more."""
        self._catalog.forget_in_fast_tiers(step)

    def restore_chosen(self, step: int | None, choose: Choose) -> Restored:
        """What `choose` picks of a step (None: of the newest that proves whole), proven as in `restore`.

        Only what is picked is read. `choose` is given the stored leaves by item and returns nested dicts of those
        that are wanted, on every process the same. The run does not go on from the step: this is a look, not a
        rollback. Raises what `restore` and `choose` raise.
        """
        self._resumer.refuse_while_pending("restore_chosen")
        self._components.pipeline.wait()
        return self._components.restorer.restore(step, RestoreRequest(args=None, default_item=None, choose=choose))
