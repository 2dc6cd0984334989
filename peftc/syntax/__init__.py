from peftc.syntax.parser import parse_expression, parse_text
from peftc.syntax.printer import print_spec, print_statement

__all__ = ["parse_expression", "parse_text", "print_spec", "print_statement"]
