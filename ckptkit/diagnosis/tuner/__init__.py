"""Finds a profile for a durable tier: what a save will cost, what the storage takes, what its bytes compress to."""

from ckptkit.diagnosis.tuner.explaining import explain as explain
from ckptkit.diagnosis.tuner.explaining import explain_checkpoint as explain_checkpoint
from ckptkit.diagnosis.tuner.proposing import Proposal as Proposal
from ckptkit.diagnosis.tuner.proposing import TunePlan as TunePlan
from ckptkit.diagnosis.tuner.proposing import measure as measure
from ckptkit.diagnosis.tuner.proposing import plan_tune as plan_tune
from ckptkit.diagnosis.tuner.proposing import tune as tune
