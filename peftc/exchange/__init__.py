"""Adapters in the formats of other programs."""

from peftc.exchange.adapter_import import ImportedAdapter, import_adapter
from peftc.exchange.conversion import convert
from peftc.exchange.export import export
from peftc.exchange.report import ExportedModule, ExportReport

__all__ = ["ExportReport", "ExportedModule", "ImportedAdapter", "convert", "export", "import_adapter"]
