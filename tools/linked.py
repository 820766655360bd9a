"""Whether `import ckptkit` is this checkout, outside of it too: exit code 0 if it is, 1 if not.

`python -I tools/linked.py`, as `make setup` does: `-I` ignores the directories of this file
and of the caller. Standard library alone, and imports nothing of the package.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    found = importlib.util.find_spec("ckptkit")
    here = Path(__file__).resolve().parents[1] / "ckptkit" / "__init__.py"
    sys.exit(found is None or found.origin is None or Path(found.origin).resolve() != here)
