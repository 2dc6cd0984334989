"""Several saved adapters on one model: attaching, choosing for a batch or its rows, exchanging."""

from peftc.attachment.activation import activate, adapter, attached
from peftc.attachment.attach import attach, detach, swap
from peftc.attachment.combination import combine
from peftc.attachment.reference import reference
from peftc.attachment.store import AdapterStore

__all__ = ["AdapterStore", "activate", "adapter", "attach", "attached", "combine", "detach", "reference", "swap"]
