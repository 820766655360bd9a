"""Proving checkpoints byte by byte, those of a running job as they appear, and mending what another tier still has."""

from ckptkit.verification.records import Finding as Finding
from ckptkit.verification.records import StepProof as StepProof
from ckptkit.verification.records import Verification as Verification
from ckptkit.verification.records import VerifyProgress as VerifyProgress
from ckptkit.verification.scrub import Scrub as Scrub
from ckptkit.verification.scrub import Treatment as Treatment
from ckptkit.verification.scrub import scrub as scrub
from ckptkit.verification.verify import verify as verify
