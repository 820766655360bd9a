"""An Orbax checkpoint in the chunks that other meshes read whole."""

from ckptkit.conversion.resharding.executing import plan_reshard as plan_reshard
from ckptkit.conversion.resharding.executing import reshard as reshard
from ckptkit.conversion.resharding.meshes import Mesh as Mesh
from ckptkit.conversion.resharding.planning import Amplification as Amplification
from ckptkit.conversion.resharding.planning import ReshardPlan as ReshardPlan
from ckptkit.conversion.resharding.planning import SpecRule as SpecRule
from ckptkit.conversion.resharding.planning import read_spec_rules as read_spec_rules
from ckptkit.conversion.resharding.source import ReshardSource as ReshardSource
from ckptkit.conversion.resharding.source import open_source as open_source
from ckptkit.conversion.resharding.source import specs_like as specs_like
