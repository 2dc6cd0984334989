"""Saved adapters: saving, loading onto a base, and initializing from them."""

from peftc.adapters.loading import load
from peftc.adapters.saving import save
from peftc.adapters.transfer import fuse, warm_start

__all__ = ["fuse", "load", "save", "warm_start"]
