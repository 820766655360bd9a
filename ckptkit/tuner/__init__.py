"""Finds a profile for a durable tier: what a save will cost, what the storage takes, what its bytes compress to."""

from ckptkit.tuner.explaining import explain as explain
from ckptkit.tuner.explaining import explain_checkpoint as explain_checkpoint
from ckptkit.tuner.proposing import Proposal as Proposal
from ckptkit.tuner.proposing import TunePlan as TunePlan
from ckptkit.tuner.proposing import measure as measure
from ckptkit.tuner.proposing import plan_tune as plan_tune
from ckptkit.tuner.proposing import tune as tune
