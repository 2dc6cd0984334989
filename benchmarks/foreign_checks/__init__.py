"""The checks of the second coverage benchmark: roles by an expected table, values by hooks."""
