"""Saved adapters: saving, loading onto a base, the hub, and initializing from them."""

from peftc.adapters.loading import load
from peftc.adapters.pretrained import from_pretrained
from peftc.adapters.publishing import push
from peftc.adapters.saving import save
from peftc.adapters.transfer import fuse, warm_start

__all__ = ["from_pretrained", "fuse", "load", "push", "save", "warm_start"]
