"""Parts of a checkpoint in a changed model: rules, a plan that can be read, and a report of what came from where."""

from ckptkit.errors import SurgeryError as SurgeryError
from ckptkit.model.leaf_patterns import Cast as Cast
from ckptkit.model.leaf_patterns import Init as Init
from ckptkit.model.leaf_patterns import Quantize as Quantize
from ckptkit.model.leaf_patterns import Rename as Rename
from ckptkit.model.leaf_patterns import Rule as Rule
from ckptkit.model.leaf_patterns import Skip as Skip
from ckptkit.model.leaf_patterns import Take as Take
from ckptkit.model.quantization import LeafError as LeafError
from ckptkit.surgery.applying import SurgeryReport as SurgeryReport
from ckptkit.surgery.applying import restore_into as restore_into
from ckptkit.surgery.planning import Leaf as Leaf
from ckptkit.surgery.planning import Origin as Origin
from ckptkit.surgery.planning import SurgeryPlan as SurgeryPlan
from ckptkit.surgery.planning import plan_surgery as plan_surgery
