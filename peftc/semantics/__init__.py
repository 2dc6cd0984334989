from peftc.semantics.arguments import bind
from peftc.semantics.checks.spec_file import check_file
from peftc.semantics.expand import expand
from peftc.semantics.load import read_spec

__all__ = ["bind", "check_file", "expand", "read_spec"]
