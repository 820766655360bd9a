"""Finds what is slow, at risk or wasteful in a run, from its event logs and checkpoints, and names remedies."""

from ckptkit.diagnosis.examining import Diagnosis as Diagnosis
from ckptkit.diagnosis.examining import diagnose as diagnose
from ckptkit.diagnosis.records import Advice as Advice
from ckptkit.diagnosis.records import Facts as Facts
from ckptkit.diagnosis.rules import RULES as RULES
