"""Maintains a root, with or without a running job: what exists, what may be deleted, what must stay."""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.upkeep.adoption import AdoptedAs as AdoptedAs
    from ckptkit.upkeep.arenas import ArenaEntry as ArenaEntry
    from ckptkit.upkeep.arenas import Cleaning as Cleaning
    from ckptkit.upkeep.arenas import clean_arenas as clean_arenas
    from ckptkit.upkeep.arenas import list_arenas as list_arenas
    from ckptkit.upkeep.arenas import require_tiers as require_tiers
    from ckptkit.upkeep.copy_planning import CopyPlan as CopyPlan
    from ckptkit.upkeep.copy_planning import plan_copy as plan_copy
    from ckptkit.upkeep.copying import copy as copy
    from ckptkit.upkeep.disk_usage import Usage as Usage
    from ckptkit.upkeep.disk_usage import usage as usage
    from ckptkit.upkeep.pinning import Pinning as Pinning
    from ckptkit.upkeep.pinning import pin as pin
    from ckptkit.upkeep.pinning import unpin as unpin
    from ckptkit.upkeep.pruning import Keep as Keep
    from ckptkit.upkeep.pruning import PrunePlan as PrunePlan
    from ckptkit.upkeep.pruning import plan_prune as plan_prune
    from ckptkit.upkeep.pruning import prune as prune
    from ckptkit.upkeep.rolling_back import RollbackPlan as RollbackPlan
    from ckptkit.upkeep.rolling_back import plan_rollback as plan_rollback
    from ckptkit.upkeep.rolling_back import rollback as rollback
    from ckptkit.upkeep.signing import Signing as Signing
    from ckptkit.upkeep.signing import sign as sign
    from ckptkit.upkeep.signing import with_signatures as with_signatures

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
