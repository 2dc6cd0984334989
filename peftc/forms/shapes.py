"""The shapes hidden states can have, as the type checker and the messages see them."""

from __future__ import annotations

from peftc.diagnostics.record import record


@record()
class Scalar:
    """A number, or one number an example where `per_example` (batch, 1, 1); one for each of so many `rows` of a prefix, too
    (batch, rows, 1).
    """

    per_example: bool = False
    rows: int = 0

    def __str__(self) -> str:
        size = self.rows or "1, 1"
        return f"[batch, {size}]" if self.per_example else "scalar"


@record()
class Tokens:
    """(batch, tokens, d); `of` tells tokens that are not those of the residual stream ("context")."""

    d: int
    of: str = ""

    def __str__(self) -> str:
        return f"[…, {self.d}]" + (f" of the {self.of}" if self.of else "")


@record()
class Prompt(Tokens):
    """Rows that are put before the tokens of the input, the same for all examples: (rows, d)."""

    of: str = "prompt"
    rows: int = 0


@record()
class Ids:
    """(batch, tokens): the rows that an embedding reads, each as a one-hot vector of `count` features."""

    count: int

    def __str__(self) -> str:
        return f"[…] of {self.count} ids"


@record()
class Heads:
    """(batch, tokens, heads, d_head)"""

    heads: int
    d_head: int

    def __str__(self) -> str:
        return f"[…, {self.heads} heads, {self.d_head}]"


@record()
class Rows:
    """q, k or v as attention sees them: (batch, heads, tokens, d_head); `of` says whose tokens ("keys")."""

    heads: int
    d_head: int
    of: str = ""

    def __str__(self) -> str:
        return f"[…, {self.heads} heads, {self.of or 'tokens'}, {self.d_head}]"


@record()
class KeyValue:
    """A pair of keys, (batch, kv_heads, tokens, d_head), and values, (batch, kv_heads, tokens, d_value or d_head)."""

    kv_heads: int
    d_head: int
    d_value: int | None = None  # where it differs from d_head
    rows: int = 0  # of a prefix: how many, in the place of the tokens

    @property
    def widths(self) -> tuple[int, int]:
        """Features of one row of keys, and of values: kv_heads · d_head each."""
        return self.kv_heads * self.d_head, self.kv_heads * (self.d_value or self.d_head)

    def __str__(self) -> str:
        d = f"{self.d_head}" if self.d_value is None else f"{self.d_head} and {self.d_value}"
        return f"keys and values [{self.kv_heads} heads, {f'{self.rows} rows' if self.rows else 'tokens'}, {d}]"


@record()
class Weight:
    """(out, in), whatever the storage."""

    d_out: int
    d_in: int

    def __str__(self) -> str:
        return f"weight [{self.d_out}, {self.d_in}]"


@record()
class Vector:
    """(d): a bias, or the weight of a norm."""

    d: int

    def __str__(self) -> str:
        return f"vector [{self.d}]"


Shape = Scalar | Tokens | Ids | Heads | Rows | KeyValue | Weight | Vector


def entries(shape: Shape) -> int:
    """Of a weight or a bias; other states have none."""
    return shape.d_out * shape.d_in if isinstance(shape, Weight) else shape.d if isinstance(shape, Vector) else 0
