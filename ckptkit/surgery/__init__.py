"""Parts of a checkpoint in a changed model: rules, a plan that can be read, and a report of what came from where."""

from ckptkit.conversion.leaf_patterns import Rename as Rename
from ckptkit.conversion.quantized_values import LeafError as LeafError
from ckptkit.errors import SurgeryError as SurgeryError
from ckptkit.surgery.applying import SurgeryReport as SurgeryReport
from ckptkit.surgery.applying import restore_into as restore_into
from ckptkit.surgery.planning import Leaf as Leaf
from ckptkit.surgery.planning import Origin as Origin
from ckptkit.surgery.planning import SurgeryPlan as SurgeryPlan
from ckptkit.surgery.planning import plan_surgery as plan_surgery
from ckptkit.surgery.rules import Cast as Cast
from ckptkit.surgery.rules import Init as Init
from ckptkit.surgery.rules import Quantize as Quantize
from ckptkit.surgery.rules import Rule as Rule
from ckptkit.surgery.rules import Skip as Skip
from ckptkit.surgery.rules import Take as Take
