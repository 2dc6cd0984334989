"""Which edits are the identity at initialisation."""

import pytest

from tests.plan import tables
from tests.plan.specs import only_edit

BART = tables.bart(layers=(2, 2))


@pytest.mark.parametrize(
    ("site", "equations", "unchanged"),
    [
        ("ffn", "h += adapter(x, r=4, init=lora)", True),
        ("ffn", "h += 4 * adapter(x, r=4, init=lora)", True),
        ("ffn", "h += scalar(init=1) * adapter(x, r=4, init=lora)", True),
        ("ffn", "h = h + gate(x) * adapter(h, r=4, init=lora)", True),
        ("ffn", "h = h - adapter(x, r=4, init=lora) / 2", True),
        ("ffn", "h = adapter(x, r=4, init=lora) + h", True),
        ("ffn", "h += scalar(init=0) * adapter(x, r=4)", True),
        ("ffn", "let g = scalar(init=0) h = (1 - g) * h + g * adapter(x, r=4)", True),
        ("ffn", "h *= vector(init=1)", True),
        ("ffn", "h *= scalar(init=0.5) + 0.5", True),
        ("ffn", "let a = h h *= 3 h = a", True),
        ("ffn", "h += adapter(x, r=4)", False),
        ("ffn", "h *= vector(init=2)", False),
        ("ffn", "h *= 2 h *= 0.5", False),
        ("ffn", "let g = gate(x) h = (1 - g) * h + g * adapter(x, r=4, init=lora)", False),
        ("ffn", "h = x", False),
        ("ffn", "h = norm(h)", False),
        ("ffn", "h = adapter(x, r=4, init=lora) - h", False),
        ("ffn", "h = 1 / h", False),
        ("ffn", "let a = h h *= 3 h += a", False),
        ("attn.q", "h += lora(x, r=4, alpha=8)", True),
        ("attn.q", "w = w + lowrank(r=4)", True),
        ("attn.q", "w = magnitude(w + lowrank(r=4))", True),
        ("attn.q", "w = magnitude(w)", True),
        ("attn.q", "w = magnitude(2 * w)", False),
        ("attn.q", "w = 2 * magnitude(w)", False),
        ("attn.q", "w = w + magnitude(lowrank(r=4))", False),
        ("attn.q", "b += 1 b = b - 1", False),
        ("attn", "kv = concat(prefix(len=4), kv)", False),
        ("attn", "kv = concat(0 * prefix(len=4), kv)", False),
    ],
)
def test_identity(site, equations, unchanged):
    assert only_edit(f"edit e at layer[*].{site} {{ {equations} }}", BART).identity is unchanged
