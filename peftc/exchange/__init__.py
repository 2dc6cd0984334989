"""Adapters in the formats of other programs."""

from peftc.exchange.adapter_import import ImportedAdapter, import_adapter
from peftc.exchange.conversion import convert
from peftc.exchange.export import export
from peftc.exchange.inspection import EditInspection, Inspection, LayerInspection, inspect
from peftc.exchange.report import ExportedModule, ExportReport

__all__ = [
    "EditInspection",
    "ExportReport",
    "ExportedModule",
    "ImportedAdapter",
    "Inspection",
    "LayerInspection",
    "convert",
    "export",
    "import_adapter",
    "inspect",
]
