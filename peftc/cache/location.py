"""Where cached site tables are: PEFTC_CACHE, else `peftc` in the user's cache folder."""

import os
import sys
from pathlib import Path

VARIABLE = "PEFTC_CACHE"


def cache_folder() -> Path | None:
    """The folder of cached site tables; None if PEFTC_CACHE is empty, or there is no home."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen).expanduser() / "sites" if chosen else None
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    folder = Path(base or default)
    try:
        folder = folder.expanduser()
    except RuntimeError:
        return None
    return folder / "peftc" / "sites" if folder.is_absolute() else None
