from peftc.semantics.arguments import Bound, bind
from peftc.semantics.checks.spec import check
from peftc.semantics.checks.spec_file import check_file
from peftc.semantics.checks.structure import said_of
from peftc.semantics.constants import amount, constant
from peftc.semantics.expand import expand
from peftc.semantics.load import read_spec

__all__ = ["Bound", "amount", "bind", "check", "check_file", "constant", "expand", "read_spec", "said_of"]
