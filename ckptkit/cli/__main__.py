"""`python -m ckptkit.cli` is the `ckptkit` command."""

import sys

from ckptkit.cli import main

sys.exit(main())
