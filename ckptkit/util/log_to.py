"""Log lines of the library on a stream, whoever owns the root logger."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to(level: int | str = "INFO", *, stream: TextIO | None = None) -> None:
    """Writes the log lines of `ckptkit` from `level` on to `stream` (default: stderr).

    For scripts. After `import orbax.checkpoint`, absl owns the root logger, and `logging.basicConfig` does nothing. The
    lines go to this stream alone: the handlers of the root logger get them no more. A second call replaces the first.
    Raises ValueError for a level that `logging` does not know.
    """
    logger = logging.getLogger("ckptkit")
    logger.setLevel(level)
    handler = _Lines(sys.stderr if stream is None else stream)
    handler.setFormatter(logging.Formatter(_FORMAT))
    for each in [each for each in logger.handlers if isinstance(each, _Lines)]:
        logger.removeHandler(each)
    logger.addHandler(handler)
    logger.propagate = False


class _Lines(logging.StreamHandler[TextIO]):
    """A handler of ours, so that the next call finds it."""
