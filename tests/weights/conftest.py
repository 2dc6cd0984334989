"""As for the laws: one thread, and variants of both kinds."""

from tests.laws.conftest import one_thread, variants_of_both_kinds

__all__ = ["one_thread", "variants_of_both_kinds"]
