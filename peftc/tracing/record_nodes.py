"""Records that traced code constructs: the graph does so at their first use.

return x, Intermediates(hiddens=hiddens, last=x)
"""

from typing import Any

from torch import fx

from peftc.tracing.proxy import concrete_values, is_proxy
from peftc.tracing.records import constructor_fields, contents, identities, record_leaves
from peftc.tracing.region_trace import TraceError
from peftc.tracing.tracer_base import TracerBase


class RecordNodes:
    """The node of each record that the traced code has passed on, and what the record held then."""

    def __init__(self, tracer: TracerBase) -> None:
        self.tracer = tracer
        self.nodes: dict[int, tuple[Any, object, fx.Node]] = {}  # the record keeps its id unique

    def node(self, record: Any) -> fx.Node | None:
        """The node that stands for a record; None for a record from outside of the trace."""
        if id(record) in self.nodes:
            _, before, node = self.nodes[id(record)]
            if before != identities(record):
                raise TraceError(f"the code changes a {type(record).__name__} that it has passed on")
            return node
        if self._is_attribute(record) or not any(map(is_proxy, record_leaves(record))):
            return None
        values = contents(record)
        fields = {name: values.pop(name) for name in constructor_fields(record) if name in values}
        node = self.tracer.record_node(type(record), (), fields)
        node.meta["example"] = concrete_values(record)
        for name, value in values.items():
            self.tracer.record_node(setattr, (node, name, value))
        self.nodes[id(record)] = (record, identities(record), node)
        return node

    def _is_attribute(self, record: Any) -> bool:
        """Whether a module holds the record: then it lives longer than a call."""
        return any(value is record for module in self.tracer.root.modules() for value in vars(module).values())
