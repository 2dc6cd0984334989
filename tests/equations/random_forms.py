"""Random forms: texts of equations that have a meaning, with parameters as they are needed."""

from __future__ import annotations

from random import Random

D_IN, D_OUT, R = 6, 4, 3
SYMBOLS = {D_IN: "d(x)", D_OUT: "d(out)", R: "r"}
WEIGHT_SYMBOLS = {D_IN: "cols(out)", D_OUT: "rows(out)", R: "r"}
ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "softplus")
FIRST_VALUES = ("0", "1", "kaiming", "normal", "normal(0.5)", "uniform(0.2)", "0.3", "orthogonal")


class Writer:
    """Writes one form.

    Args:
        nonlinear: whether it may have activations of the input.
        of_weight: whether it is a change of a weight.
        of_layers: whether it reads values of sites below.
    """

    def __init__(self, seed: int, nonlinear: bool = True, of_weight: bool = False, of_layers: bool = False) -> None:
        self.of_layers = of_layers
        self.random, self.nonlinear, self.of_weight = Random(seed), nonlinear, of_weight
        self.symbols = WEIGHT_SYMBOLS if of_weight else SYMBOLS
        self.lines: list[str] = []
        self.lets: list[tuple[str, int]] = []
        self.count = 0

    def text(self, name: str) -> str:
        value = self.matrix(D_OUT, D_IN, 3) if self.of_weight else self.features(D_OUT, 4)
        inputs = "" if self.of_weight else "x, "
        body = "\n".join(f"    {line}" for line in self.lines)
        head = f"form {name}({inputs}r, s = 2) {{\n    require r <= {self.symbols[D_IN]}"
        return f"{head}\n{body}\n    f = s * {value}\n}}\n"

    def bound(self) -> str:
        """A new name of a term's number."""
        self.count += 1
        return f"i{self.count}"

    def parameter(self, *sizes: int) -> str:
        self.count += 1
        name, kind = f"P{self.count}", "param" if self.random.random() < 0.85 else "fixed"
        first = self.random.choice(FIRST_VALUES if len(sizes) == 2 else FIRST_VALUES[:-1])
        size = ", ".join(self.symbols.get(n, str(n)) for n in sizes)
        self.lines.append(f"{kind} {name}[{size}] = {first}")
        return name

    def features(self, n: int, depth: int) -> str:
        """An expression of `n` features of each token, which depends on the input."""
        choice = self.random.choice
        if depth == 0:
            return "x" if n == D_IN else f"({self.parameter(n, D_IN)} @ x)"
        ways = ["product", "product", "product", "sum", "difference", "scaled", "factors", "shifted", "wrapped", "let"]
        ways += ["transpose", "blocks", "quotient", "negative", "mean"]
        ways += ["each", "circulant", "concat"]
        ways += (
            ["wave", "clamp", "activation", "activation", "softmax", "layer_norm", "rms_norm", "gate"]
            if self.nonlinear
            else []
        )
        ways += ["below", "history"] * 4 if self.of_layers else []
        way = choice(ways)
        inner = self.features
        match way:
            case "product":
                m = choice((D_IN, D_OUT, R))
                return f"({self.parameter(n, m)} @ {inner(m, depth - 1)})"
            case "transpose":
                m = choice((D_IN, D_OUT, R))
                return f"(t({self.parameter(m, n)}) @ {inner(m, depth - 1)})"
            case "blocks":
                k = 2 if n % 2 == 0 else 1
                m = choice((D_IN, D_OUT))
                return f"(blocks({self.parameter(k, n // k, m // k)}) @ {inner(m, depth - 1)})"
            case "each":
                m = choice((D_IN, D_OUT, R))
                i = self.bound()
                factor, value = choice(("", f"({i} + 1) * ", f"{self.parameter(2)}[{i}] * ")), inner(m, depth - 1)
                return f"sum({i} in 2, {factor}{self.parameter(2, n, m)}[{i}] @ {value})"
            case "circulant":
                m = choice((D_IN, D_OUT))
                b = choice([b for b in (1, 2, n) if n % b == m % b == 0])
                blocks = self.parameter(n) if b == n == m else self.parameter(n // b, m // b, b)
                return f"(circulant({blocks}) @ {inner(m, depth - 1)})"
            case "concat" if self.count % 2:
                whole = f"concat({inner(n, depth - 1)}, {inner(R, depth - 1)})"
                return f"narrow({whole}, {1 + self.count % R % 2}, {n})"  # some of both
            case "concat":
                return f"(concat({self.parameter(n - 2)}, {self.parameter(2)}) * {inner(n, depth - 1)})"
            case "rms_norm":
                value = inner(n, depth - 1)
                return f"rms_norm({f'({value} + 1)' if 'norm(' in value else value})"  # 0 / 0 of equal features
            case "clamp":
                return f"clamp(2 * {inner(n, depth - 1)}, 0 - s, {choice((0, 1, 's'))})"
            case "layer_norm":
                return f"layer_norm({inner(n, depth - 1)}{choice(('', ', 0.1', ', s'))})"
            case "sum":
                return f"({inner(n, depth - 1)} + {inner(n, depth - 1)})"
            case "difference":
                left, right = inner(n, depth - 1), inner(n, depth - 1)
                return f"({left} - {right if right != left else self.parameter(n)})"  # x - x is constant
            case "scaled":
                return f"({choice((0.5, 2, 's'))} * {inner(n, depth - 1)})"
            case "factors":
                return f"({self.parameter(n)} * {inner(n, depth - 1)})"
            case "shifted":
                return f"({inner(n, depth - 1)} + {self.parameter(n)})"
            case "quotient":
                return f"({inner(n, depth - 1)} / {choice((2, 's', 4))})"
            case "negative":
                return f"(-{inner(n, depth - 1)})"
            case "wrapped":
                return choice(
                    ("dropout({}, 0.1)", "frozen({})", "none({})", "logistic_noise({})", "normal_noise({}, 0.5)")
                ).format(inner(n, depth - 1))
            case "mean":
                value, other = inner(n, depth - 1), inner(choice((D_IN, R)), depth - 1)
                if self.count % 2:  # one feature instead
                    return f"({value} + {other}[{self.count % R}])"
                if other.startswith(("softmax", "layer_norm")):  # of which the mean is constant
                    other = f"({self.parameter(n, D_IN)} @ x)"
                return f"({value} + mean({other}))"
            case "let":
                known = [name for name, size in self.lets if size == n]
                if known:
                    return choice(known)
                value = inner(n, depth - 1)
                self.lets.append((f"u{len(self.lets)}", n))
                self.lines.append(f"let {self.lets[-1][0]} = {value}")
                return self.lets[-1][0]
            case "below":
                self.count += 1
                name, value = f"s{self.count}", inner(n, depth - 1)
                first = choice(("0", "0.5", self.parameter(n), f"({self.parameter(n, D_IN)} @ x)"))
                below = choice(("{p} * {s}", "-{s}", "sigmoid({s} + {p})", "frozen({s}) / 2"))
                below = below.format(p=self.parameter(n), s=f"below({name}, {first})")
                self.lets.append((name, n))
                self.lines.append(f"let {name} = {value} + {below}" if depth % 2 else f"let {name} = {below} - {value}")
                return choice((name, f"below({name}, {first})" if len(first) < 4 else name))
            case "history":
                m = choice((D_IN, R))
                value, q = inner(m, depth - 1), self.parameter(m)
                rows = f"history({value})"
                return f"({self.parameter(n, m)} @ (t({rows}) @ softmax({rows} @ {q})))"
            case "activation":
                return f"{choice(ACTIVATIONS)}({inner(n, depth - 1)})"
            case "wave":
                return f"{choice(('cos', 'sin'))}({inner(n, depth - 1)})"
            case "gate":
                return f"({inner(n, depth - 1)} * sigmoid({self.parameter(1, n)} @ {inner(n, depth - 1)}))"
            case _:
                return f"{way}({inner(n, depth - 1)})"

    def matrix(self, n: int, m: int, depth: int) -> str:
        """An expression of a matrix that does not depend on an input."""
        choice, inner = self.random.choice, self.matrix
        if depth == 0:
            return self.parameter(n, m)
        ways = ["product", "product", "sum", "entries", "kron", "rows", "blocks", "t", "scaled", "unit", "act"]
        match choice([*ways, "each", "all", "rotated", "fourier", "solved", "turned", "logarithm"]):
            case "product":
                return f"({inner(n, R, depth - 1)} @ {inner(R, m, depth - 1)})"
            case "each":
                i = self.bound()
                return f"sum({i} in s, {self.parameter(2, n, m)}[{i}] / ({i} + 1))"
            case "all":
                i = self.bound()
                return f"(product({i} in 2, {self.parameter(2, n, n)}[{i}]) @ {inner(n, m, depth - 1)})"
            case "rotated":
                q = f"skew({self.parameter(n * (n - 1) // 2)})"
                return f"({choice(('cayley({})', '(eye({0}) + power({0}, 2))')).format(q)} @ {inner(n, m, depth - 1)})"
            case "turned":
                k = 2 if m == D_OUT else 3 if m == D_IN else 1
                q = f"cayley(skew({self.parameter(m // k, k * (k - 1) // 2)}))" if k > 1 else self.parameter(m, 1, 1)
                return f"({inner(n, m, depth - 1)} @ {choice(('blocks({})', 't(blocks({}))')).format(q)})"
            case "fourier":
                return f"fourier({inner(n, m, depth - 1)})"
            case "solved":
                q = f"skew({self.parameter(n * (n - 1) // 2)})"
                return f"solve(eye({q}) + {q}, {inner(n, m, depth - 1)})"
            case "sum":
                return f"({inner(n, m, depth - 1)} - {inner(n, m, depth - 1)})"
            case "entries":
                return f"({inner(n, m, depth - 1)} * {inner(n, m, depth - 1)})"
            case "kron":
                k, j = (2 if n % 2 == 0 else 1), (2 if m % 2 == 0 else 1)
                return f"kron({self.parameter(k, j)}, {self.parameter(n // k, m // j)})"
            case "rows":
                return f"({self.parameter(n, 1)} * {inner(n, m, depth - 1)})"
            case "blocks":
                k = 2 if n % 2 == 0 and m % 2 == 0 else 1
                return f"blocks({self.parameter(k, n // k, m // k)})"
            case "t":
                return f"t({inner(m, n, depth - 1)})"
            case "scaled":
                return f"({inner(n, m, depth - 1)} / {choice((2, 's'))})"
            case "logarithm":
                return f"log(exp({inner(n, m, depth - 1)}) + log(s))"
            case "unit":
                value = inner(n, m, depth - 1)
                return f"({value} / (1 + norm({value})))"
            case _:
                return f"tanh({inner(n, m, depth - 1)})"
