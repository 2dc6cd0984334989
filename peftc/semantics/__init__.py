from peftc.semantics.arguments import BoundArguments, bind
from peftc.semantics.checks.spec import check, with_origin
from peftc.semantics.checks.spec_file import check_file
from peftc.semantics.constants import constant, numeric_value
from peftc.semantics.expand import expand
from peftc.semantics.load import read_spec

__all__ = [
    "BoundArguments",
    "bind",
    "check",
    "check_file",
    "constant",
    "expand",
    "numeric_value",
    "read_spec",
    "with_origin",
]
