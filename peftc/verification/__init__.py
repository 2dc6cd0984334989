"""Verification of a compiled model against a reference: its spec, evaluated on its base."""

from peftc.verification.report import Check, Finding, NotWitnessed, Verification, VerifiedEdit
from peftc.verification.verify import compilation_check, verify

__all__ = ["Check", "Finding", "NotWitnessed", "Verification", "VerifiedEdit", "compilation_check", "verify"]
