"""What the value of a primitive is when training starts, and how it depends on the input."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack

from peftc.equations.rules import Operand, Primitive
from peftc.equations.values import Value

EYE = "eye"  # the first value that is the identity
_LONGEST = 200  # of the text of a first value: that of a part may stand in it many times


def initial_value(primitive: Primitive, operands: Sequence[Operand]) -> float | None:
    """What a value equals when training starts."""
    try:
        numbers = [initial_number(operand) for operand in operands]
        if not primitive.torch:
            return numbers[0]
        if (
            primitive.name in ("*", "@", "kron", "permuted", "gather", "scatter", "pruned", "wavelet")
            and 0.0 in numbers
        ):
            return 0.0
        if primitive.name in ("/", "ratio", "positions") and numbers[0] == 0.0:
            return 0.0  # `_apply` refuses a divisor that is 0, and a ratio has none
        if primitive.name == "causal_attention" and numbers[2] == 0.0:
            return 0.0
        if primitive.name == "-" and _are_equal(operands):
            return 0.0
        if primitive.initial is None or None in numbers:
            return None
        result = primitive.initial(*numbers)
        return result if all(map(_is_exact, (*numbers, result))) else None
    except (ArithmeticError, ValueError):
        return None


def first_value(primitive: Primitive, operands: Sequence[Operand]) -> str:
    """What a value is when training starts, as a function of the base's weight w and of the first
    values of parameters, or as the input that it equals; empty: unknown.

    The ratio of two equal values is 1 where they are not 0, and w is 0 where its norm is: its
    product with w is w, bit for bit.
    """
    firsts = [_first(operand) for operand in operands]
    sizes = {operand.type.size for operand in operands if isinstance(operand, Value)}
    match primitive.name, firsts:
        case (("frozen" | "column" | "none" | "dropout"), [first, *_]):
            return first
        case (("cayley" | "power" | "eye"), [_, *_]) if primitive.name == "eye" or _is_identity(
            primitive.name, operands
        ):
            return EYE
        case (("blocks" | "t"), ["eye"]):
            return EYE
        case "@", [first, "eye"] | ["eye", first] if first:
            return first
        case (("+" | "-"), [first, _]) if first and initial_number(operands[1]) == 0:
            return first
        case "norm", [first] if first:
            return f"norm({first})"
        case "ratio", [a, b] if a and a == b and len(sizes) == 1:
            return f"ratio({a})"
        case "*", ["ratio(norm(w))", "w"] | ["w", "ratio(norm(w))"]:
            return "w"
        case "*", [first, _] if first and initial_number(operands[1]) == 1:
            return first
        case "*", [_, first] if first and initial_number(operands[0]) == 1:
            return first
        case _:
            texts = [_first(operand) if isinstance(operand, Value) else str(operand) for operand in operands]
            text = f"{primitive.name}({', '.join(texts)})"
            return text if all(texts) and len(text) <= _LONGEST else ""


def undefined_at_first(primitive: Primitive, operands: Sequence[Operand], text: str) -> tuple[str, str | None] | None:
    """Why a value is not finite when training starts, and what to write; None if it may be.

    Args: `text`: the expression.
    """
    numbers = list(map(initial_number, operands))
    match primitive.name, numbers:
        case "/", [_, 0.0] if not isinstance(operands[1], Value):
            return f"`{text}` divides by zero", None
        case "/", [_, 0.0]:
            return f"`{text}` divides by zero when training starts", "`ratio(a, b)` is `a` where `b` is 0"
        case (("inverse" | "solve"), [0.0, *_]):
            return f"`{text}` inverts a matrix of zeros when training starts", "give it another first value"
        case (("log" | "sqrt"), [float(number)]) if number < 0 or (number == 0 and primitive.name == "log"):
            return f"`{text}` is no finite number when training starts", "give it another first value"
        case _:
            return None


def _are_equal(operands: Sequence[Operand]) -> bool:
    """Whether two tensors have the same values when training starts."""
    left, right = operands
    if not isinstance(left, Value) or not isinstance(right, Value) or not left.first:
        return False
    return (left.first, left.type.size) == (right.first, right.type.size)


def _first(operand: Operand) -> str:
    return operand.first if isinstance(operand, Value) else ""


def _is_identity(name: str, operands: Sequence[Operand]) -> bool:
    """Whether the Cayley transform is that of 0, or a power is the 0th."""
    return initial_number(operands[0]) == 0 if name == "cayley" else operands[1] == 0


def initial_number(operand: Operand) -> float | None:
    number = operand.initial if isinstance(operand, Value) else operand
    return float(number) if isinstance(number, int | float) else None


def _is_exact(number: float | None) -> bool:
    """Whether float32 holds a number: what it rounds, the plan does not promise."""
    return number is not None and abs(number) < 1e38 and unpack("f", pack("f", number))[0] == number


def shifts(primitive: Primitive, operands: Sequence[Operand]) -> bool:
    """Whether a value may differ from zero where the input is zero."""
    nonzero = [operand.shifted if isinstance(operand, Value) else operand != 0 for operand in operands]
    match primitive.affinity:
        case "linear":
            return nonzero[0]
        case "product":
            return all(nonzero)
        case "quotient":
            return nonzero[0]
        case "sum":
            return any(nonzero)
        case "nonlinear":
            return True


def reason_against(primitive: Primitive, operands: Sequence[Operand], text: str, choice: str = "") -> str | None:
    """Why a primitive is not affine in what varies of its operands; None if it is.

    Args:
        text: the expression.
        choice: by which argument of the form it is what it is.
    """
    varying = [isinstance(operand, Value) and operand.varies for operand in operands]
    if not any(varying):
        return None
    first = operands[0]
    of_tokens = isinstance(first, Value) and bool(first.type.batch)
    match primitive.affinity:
        case "linear" | "sum":
            is_map = primitive.name != "reshape" and not (primitive.name == "t" and of_tokens)
            return None if is_map else f"`{text}` is no map of one matrix"
        case "product" if primitive.name == "@" and of_tokens and sum(varying) == 1:
            return f"`{text}` is no map of one matrix"
        case "product":
            return f"`{text}` multiplies two values that depend on the input" if sum(varying) > 1 else None
        case "quotient":
            return f"`{text}` divides by a value that depends on the input" if varying[1] else None
        case "nonlinear" if primitive.name == "positions":
            return "it acts on some positions only"
        case "nonlinear" if primitive.name == "causal_attention":
            return "it depends on the states of other tokens"
        case "nonlinear" if primitive.name == "history":
            return "it depends on the states of all layers"
        case "nonlinear":
            return f"`{text}` is not linear{choice}"
