"""Saved adapters: writing them, reading them onto their base, starting from one."""

from peftc.adapters.fusion import fuse
from peftc.adapters.loading import load
from peftc.adapters.saving import save
from peftc.adapters.warm_start import warm_start

__all__ = ["fuse", "load", "save", "warm_start"]
