"""Branches on values known only inside a region: both branches are generated, or the model's own
error is raised.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.specialization.call_paths import MAX_PATHS
from peftc.specialization.generated_class import GeneratedClass


class Deciding(nn.Module):
    """Branches on the shape of its own intermediate result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.inner(x))
        if y.shape[1] > 3:
            return y.cumsum(1)
        if y.size() != (x.shape[0], x.shape[1], 4):
            raise ValueError("four features are expected")
        return y * max(0, y.shape[1] - 2)


class Nested(Deciding):
    """Branches again inside the branch that the first call does not take."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.inner(x))
        if y.shape[1] > 1:
            y = y.flip(1)
            if y.shape[1] > 3:
                return y.cumsum(1) if y.shape[1] > 5 else y * y.shape[0]
            y = y + 1
        return y * 2


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        for n in range(MAX_PATHS):
            y = y + max(n, y.shape[1])
        return y


class Biased(nn.Module):
    """Returns a bias, too, if it has one."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.randn(4)) if biased else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.inner(x), self.bias


class Adding(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.child = Biased(biased)

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.child(x)
        return y if bias is None else y + bias.expand_as(y)


def rewritten(module: nn.Module) -> GeneratedClass:
    kind = GeneratedClass(type(module), frozenset([""]), (), type(module).__name__)
    module.__class__ = kind.cls
    return kind


@pytest.mark.parametrize("first", [1, 3, 4, 7])
@pytest.mark.parametrize("cls", [Deciding, Nested])
def test_one_forward_serves_all_sizes(cls: type[nn.Module], first: int) -> None:
    base, module = cls(), cls()
    module.load_state_dict(base.state_dict())
    kind = rewritten(module)
    for tokens in (first, 2, 3, 1, 7, 4):
        x = torch.randn(2, tokens, 4)
        assert torch.equal(module(x), base(x))
    assert len(kind.variants) == 1


def test_errors_of_the_models_own_code_are_raised() -> None:
    module = Deciding()
    kind = rewritten(module)
    module(torch.randn(2, 3, 4))
    module.inner = nn.Linear(4, 5)
    with pytest.raises(ValueError, match="four features are expected"):
        module(torch.randn(2, 3, 4))
    assert len(kind.variants) == 1
    assert "raise ValueError('four features are expected')" in kind.source


def test_too_many_paths_are_refused() -> None:
    module = Undecided()
    rewritten(module)
    with pytest.raises(peftc.PeftcError, match="P406"):
        module(torch.randn(2, 3, 4))


class Asking(nn.Module):
    """Asks for the device of its own result, and asserts its size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        torch._assert(y.shape[1] % 2 == 0, "an even number of tokens")
        return y.float() if y.device.type == "mps" else torch.relu(y)


def test_devices_and_assertions_are_no_decisions_at_run_time() -> None:
    base, module = Asking(), Asking()
    module.load_state_dict(base.state_dict())
    kind = rewritten(module)
    for tokens in (2, 4):
        x = torch.randn(2, tokens, 4)
        assert torch.equal(module(x), base(x))
    assert "x.device.type == 'cpu'" in kind.source
    with pytest.raises(AssertionError, match="an even number of tokens"):
        module(torch.randn(2, 3, 4))


class Looking(nn.Module):
    """Decides on what only autograd knows of its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if y.grad_fn is None else y * 2


def test_a_refusal_names_the_line_that_decides() -> None:
    module = Looking()
    rewritten(module)
    with pytest.raises(peftc.PeftcError, match="P406") as excinfo:
        module(torch.randn(2, 3, 4))
    (diagnostic,) = excinfo.value.diagnostics
    line = next(note for note in diagnostic.notes if note.startswith("at "))
    assert line.endswith("in Looking.forward: `return y if y.grad_fn is None else y * 2`")


@pytest.mark.parametrize("biased", [False, True])
def test_an_optional_part_of_a_childs_result(biased: bool) -> None:
    base, module = Adding(biased), Adding(biased)
    module.load_state_dict(base.state_dict())
    rewritten(module)
    x = torch.randn(2, 3, 4)
    assert torch.equal(module(x), base(x))


def test_an_optional_result_that_is_new_fails_the_guard() -> None:
    module = Adding(biased=False)
    rewritten(module)
    x = torch.randn(2, 3, 4)
    module(x)
    module.child.bias = nn.Parameter(torch.randn(4))
    with pytest.raises(peftc.PeftcError, match="P408"):
        module(x)


def factor(doubled: bool | None) -> float:
    return 2.0 if doubled is True else 3.0


class Factored(nn.Module):
    """Maps a flag to a number in another function, which a proxy for the flag does not detect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, doubled: bool | None = None) -> Tensor:
        return self.inner(x) * factor(doubled)


class Chooser:
    def __init__(self) -> None:
        self.choose = factor


class Chosen(Factored):
    """The same, through a function in an attribute."""

    def forward(self, x: Tensor, doubled: bool | None = None) -> Tensor:
        return self.inner(x) * Chooser().choose(doubled)


@pytest.mark.parametrize(
    ("cls", "flags"),
    [(Factored, (True, False, None)), (Factored, (None, True)), (Chosen, (True, False, None)), (Chosen, (False, True))],
)
def test_a_number_that_a_flag_chooses(cls: type[nn.Module], flags: tuple[bool | None, ...]) -> None:
    base, module = cls(), cls()
    module.load_state_dict(base.state_dict())
    rewritten(module)
    x = torch.randn(2, 3, 4)
    for flag in flags:
        assert torch.equal(module(x, flag), base(x, flag))


class PassesFlag(nn.Module):
    """Passes a flag through, and recomputes a number in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Factored()

    def forward(self, x: Tensor, doubled: bool | None = None) -> Tensor:
        return self.child(x, doubled) * float("1.5")


def test_a_flag_that_is_passed_through_needs_no_guard() -> None:
    base, module = PassesFlag(), PassesFlag()
    module.load_state_dict(base.state_dict())
    kind = rewritten(module)
    x = torch.randn(2, 3, 4)
    for flag in (True, False, None):
        assert torch.equal(module(x, flag), base(x, flag))
    assert len(kind.variants) == 1


class Pooled(nn.Module):
    """Reads one table if its queries are pooled, the other if not, and an optional mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, key: Tensor, options: tuple[list[Tensor | None], Tensor | None]) -> Tensor:
        tables, mask = options
        query = self.inner(x).view(x.shape[0], x.shape[1], 2, 2) * 2
        y = query.flatten(2) + tables[1 if query.shape[1] != key.shape[1] else 0]
        return y if mask is None else y * mask


def test_a_branch_on_sizes_whose_other_side_cannot_run() -> None:
    """It is a guard on the sizes of arguments. An element of a tuple argument may be None in some
    calls.
    """
    base, module = Pooled(), Pooled()
    module.load_state_dict(base.state_dict())
    rewritten(module)
    key, mask, long, short = torch.randn(2, 7, 4), torch.randn(2, 7, 1), torch.randn(7, 4), torch.randn(4, 4)
    calls = [
        (torch.randn(2, 4, 4), ([long, short], None)),
        (torch.randn(2, 7, 4), ([long, short], mask)),
        (torch.randn(2, 7, 4), ([long, None], None)),
        (torch.randn(2, 4, 4), ([None, short], None)),
        (torch.randn(2, 7, 4), ([long, short], None)),
        (torch.randn(2, 4, 4), ([None, short], mask[:, :4])),
    ]
    for x, options in calls * 2:
        assert torch.equal(module(x, key, options), base(x, key, options))


class Windowed(nn.Module):
    """Reads a window's height and width, two numbers in one attribute."""

    def __init__(self, window: tuple[int, int]) -> None:
        super().__init__()
        self.window, self.inner = window, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).unflatten(1, self.window).sum(2)


def test_tuples_in_attributes_are_not_constants() -> None:
    base, module, x = Windowed((2, 3)), Windowed((2, 3)), torch.randn(1, 6, 4)
    module.load_state_dict(base.state_dict())
    rewritten(module)
    assert torch.equal(module(x), base(x))
    base.window = module.window = (3, 2)
    assert torch.equal(module(x), base(x))


class Scaled(nn.Module):
    """Computes a Python number from the width of an intermediate tensor."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inner, self.heads, self.width = nn.Linear(4, 4), heads, 4 // heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y = y.view(y.shape[0], y.shape[1], self.heads, self.width).permute(0, 2, 1, 3).transpose(1, 2)
        return y.flatten(2) / float(y.size(-1) ** 0.5)


def test_numbers_computed_from_inner_sizes() -> None:
    base, module, x = Scaled(1), Scaled(1), torch.randn(2, 3, 4)
    module.load_state_dict(base.state_dict())
    kind = rewritten(module)
    for heads in (1, 4):
        base.heads, base.width = module.heads, module.width = heads, 4 // heads
        assert torch.equal(module(x), base(x))
    assert len(kind.variants) == 2


class Every(nn.Module):
    """Returns every `step`-th token."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :: self.step]


class Paired(nn.Module):
    """Adds tokens in pairs if a child, whose code is a leaf, returns more than three."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.inner, self.child = nn.Linear(4, 4), Every(step)

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(torch.relu(self.inner(x)))
        return y.unflatten(1, (-1, 2)).sum(2) if y.shape[1] > 3 else y


def test_a_traced_branch_that_fails_is_an_error_of_peftc() -> None:
    base, module = Paired(2), Paired(2)
    module.load_state_dict(base.state_dict())
    rewritten(module)
    x = torch.randn(2, 6, 4)
    assert torch.equal(module(x), base(x))  # the child returns three tokens, which are not summed in pairs
    module.child.step = base.child.step = 1
    with pytest.raises(peftc.PeftcError, match="P417") as excinfo:
        module(x)
    assert "unflatten" in str(excinfo.value)


class Gained(nn.Module):
    """Multiplies by an optional number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if self.gain is None else y * self.gain


@pytest.mark.parametrize("gains", [(2.0, None, 3.0), (None, 2.0, None)])
def test_an_optional_number_needs_a_guard(gains: tuple[float | None, ...]) -> None:
    base, module, x = Gained(), Gained(), torch.randn(2, 3, 4)
    module.load_state_dict(base.state_dict())
    rewritten(module)
    for gain in gains:
        base.gain = module.gain = gain  # type: ignore[assignment]
        assert torch.equal(module(x), base(x))


class Selfish(nn.Module):
    """Has a child called `self`, as some attentions do, and arguments named like a child and like a
    function it calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.self, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, inner: Tensor, relu: Tensor) -> Tensor:
        y = torch.relu(self.self(x))
        return self.inner(y) * inner + relu


def test_no_local_variable_shadows_an_argument() -> None:
    base, module = Selfish(), Selfish()
    module.load_state_dict(base.state_dict())
    rewritten(module)
    arguments = [torch.randn(2, 3, 4) for _ in range(3)]
    assert torch.equal(module(*arguments), base(*arguments))


class ReadTwice(nn.Module):
    """Uses one weight in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight).relu()
        return nn.functional.linear(y, self.weight)


def test_every_read_of_a_weight_sees_the_edited_one() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(ReadTwice(), ReadTwice()), torch.randn(2, 3, 4)
    plain = [layer.weight.detach().clone() for layer in model]
    peftc.compile('peft 1\nedit e at "0" | "1" { w = w + lowrank(r=2) }', model, seed=0, sample={"input": x})
    values = [p.data.normal_() for p in peftc.parameters(model).values()]
    want = x
    for weight, a, b in zip(plain, values[::2], values[1::2], strict=True):
        weight = weight + b @ a
        want = torch.nn.functional.linear(torch.nn.functional.linear(want, weight).relu(), weight)
    torch.testing.assert_close(model(x), want)


class AskingNumbers(Deciding):
    """Asks for a truth value as a number of Python, as the masks of GTrXL are asked."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        mask = y > 0.5
        if mask.any().item():
            y = y.masked_fill(mask, 0.0)
        return y + 1 if not (y < 0).all().item() else 2 * y


def test_code_may_ask_for_a_truth_value_as_a_number() -> None:
    base, module = AskingNumbers(), AskingNumbers()
    module.load_state_dict(base.state_dict())
    rewritten(module)
    for scale in (0.0, 1.0, 5.0):
        x = scale * torch.randn(2, 3, 4)
        assert torch.equal(module(x), base(x))
    assert torch.equal(module.train()(x), base(x))
