"""Making many objects that stay, quickly."""

import gc
from collections.abc import Generator

from peftc.concurrency.interrupts import shielded


@shielded
def paused_gc() -> Generator[None]:
    """Runs the body without garbage collection.

    Importing one transformers modeling file allocates the objects of some two thousand modules,
    which all stay alive. Collecting in between frees nothing and takes a third of the time; so
    does a collection at the end, so what the body has made is put with what has survived many.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else something has frozen objects that should stay so
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
