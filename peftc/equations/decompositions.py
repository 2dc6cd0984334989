"""Decompositions of a weight of the base, from which first values are computed: one row a part."""

from __future__ import annotations

from collections.abc import Mapping

from peftc.equations import rules
from peftc.equations.primitives import Primitive

_SVD, _QR = "peftc.equation_code.functions.svd", "peftc.equation_code.functions.qr"

DECOMPOSITIONS: Mapping[str, Primitive] = {
    f"{function}.{part}": Primitive(f"{function}.{part}", f"{call}.{part}", doc, rule, torch, operands=operands)
    for function, part, call, doc, rule, torch, operands in (
        (
            "svd",
            "u",
            "svd(w, r)",
            "the first r left singular vectors, as columns",
            rules.left_vectors,
            _SVD,
            (2, 2),
        ),
        ("svd", "s", "svd(w, r)", "the r largest singular values of w", rules.singular_values, _SVD, (2, 2)),
        (
            "svd",
            "v",
            "svd(w, r)",
            "the first r right singular vectors, as columns",
            rules.right_vectors,
            _SVD,
            (2, 2),
        ),
        ("qr", "q", "qr(w)", "Q of w = Q R, with orthonormal columns", rules.orthonormal_factor, _QR, (1, 1)),
        ("qr", "r", "qr(w)", "R of w = Q R, upper triangular", rules.triangular_factor, _QR, (1, 1)),
    )
}
DECOMPOSED = {"svd": ("u", "s", "v"), "qr": ("q", "r")}
