"""Adapters in the formats of other programs."""

from peftc.exchange.export import export
from peftc.exchange.report import ExportedModule, ExportReport

__all__ = ["ExportReport", "ExportedModule", "export"]
