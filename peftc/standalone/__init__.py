"""Models that run where peftc is not installed."""

from peftc.standalone.saving import save_standalone

__all__ = ["save_standalone"]
