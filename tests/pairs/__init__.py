"""Two at once: each pair of commands over one root, at enumerated interleavings of their storage operations.

The first command pauses at its n-th operation, the second one runs whole, and the first one continues: for every n,
and in both roles. `Pairs` runs one such interleaving and judges it by plain listings and by restores of stock Orbax.
No step may be lost that neither command was asked to delete, and no success may be claimed that is not there.
Nothing sound may be called damaged.
"""

from tests.pairs.commands import COMMANDS, Command, pairs_of
from tests.pairs.running import Failure, Interleaving, Pairs

__all__ = ["COMMANDS", "Command", "Failure", "Interleaving", "Pairs", "pairs_of"]
