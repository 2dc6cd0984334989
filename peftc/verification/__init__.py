"""An independent witness: a compiled model against its spec, computed on its base."""

from peftc.verification.report import Check, Finding, NotWitnessed, Verification, VerifiedEdit
from peftc.verification.verify import last_step, verify

__all__ = ["Check", "Finding", "NotWitnessed", "Verification", "VerifiedEdit", "last_step", "verify"]
