"""The command `lsp`: `check` in an editor, as a language server over standard input and output."""

import gc
from argparse import Namespace
from importlib import import_module
from importlib.util import find_spec

from peftc.cli.spec_files import Unusable


def run_lsp(args: Namespace) -> int:
    """Serves one client. Raises: Unusable without pygls."""
    if find_spec("pygls") is None:
        raise Unusable('the language server needs pygls: pip install "peftc[lsp]"')
    gc.enable()  # which commands that end soon do without
    return import_module("peftc.language_server.features").run()
