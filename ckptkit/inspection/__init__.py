"""Describes checkpoints and lists steps, from metadata alone, for people and for the command."""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.inspection.look import inspect as inspect
    from ckptkit.inspection.records import Holding as Holding
    from ckptkit.inspection.records import Inspection as Inspection
    from ckptkit.inspection.records import Item as Item
    from ckptkit.inspection.records import Listing as Listing
    from ckptkit.inspection.records import SaveOrigin as SaveOrigin
    from ckptkit.inspection.records import StepEntry as StepEntry
    from ckptkit.inspection.records import totals as totals
    from ckptkit.inspection.steps import list_steps as list_steps
    from ckptkit.model.leaf_info import LeafInfo as LeafInfo

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
