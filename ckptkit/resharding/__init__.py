"""An Orbax checkpoint in the chunks that other meshes read whole."""

from ckptkit.resharding.amplification import Amplification as Amplification
from ckptkit.resharding.choosing import SpecRule as SpecRule
from ckptkit.resharding.choosing import read_spec_rules as read_spec_rules
from ckptkit.resharding.executing import plan_reshard as plan_reshard
from ckptkit.resharding.executing import reshard as reshard
from ckptkit.resharding.meshes import Mesh as Mesh
from ckptkit.resharding.planning import ReshardPlan as ReshardPlan
from ckptkit.resharding.source import Source as Source
from ckptkit.resharding.source import open_source as open_source
from ckptkit.resharding.source import specs_like as specs_like
