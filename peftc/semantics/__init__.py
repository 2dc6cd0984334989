from peftc.semantics.arguments import bind
from peftc.semantics.expand import check_file, expand
from peftc.semantics.files import read_spec

__all__ = ["bind", "check_file", "expand", "read_spec"]
