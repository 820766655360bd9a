"""`python -m ckptkit`: the command `ckptkit`, also where the directory of scripts is not on the PATH."""

import sys

from ckptkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
