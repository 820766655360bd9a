"""The calls that all processes make together, apart from saves: restore, reload, delete."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from ckptkit.save.pipeline import SavePipeline


@final
class CollectiveCalls:
    """Names these calls, and brings the processes together before each. Belongs to the step loop's thread.

    A call is counted at its entry, before anything can raise: a process whose call raised has the same names as the
    others at the next one.
    """

    def __init__(self, pipeline: SavePipeline):
        self._pipeline = pipeline
        self._numbers = itertools.count()

    @contextmanager
    def entered(self, kind: str) -> Iterator[str]:
        """A call, with the name of its barriers. Where the body raises, the other processes raise at once.

        After the body every process has finished its saves, and knows what process 0 has decided of them. Raises
        `CheckpointError` where another process raised, `CoordinationError` where one did not come.
        """
        name = f"{kind}-{next(self._numbers)}"
        try:
            yield name
            self._pipeline.threads.wait()
        except BaseException as error:
            self._pipeline.run(self._pipeline.withdraw(name, error))
            raise
        self._pipeline.run(self._pipeline.synchronise(name))
