"""Parameters shared by several sites: one owner module, members that hold no parameters, rows after
export.
"""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from peftc.equation_code.module import EquationModule
from peftc.forms.member_module import Member
from peftc.forms.module import build, build_owner
from peftc.forms.shapes import KeyValue, Tokens
from tests.forms.cases import Case, seeded

GROUP = Case("prefix", KeyValue(2, 4), None, {"len": 6, "reparam": ("mlp", 7)}, sites=3)
SHARED = Case("adapter", Tokens(12), Tokens(12), {"r": 4, "dropout": 0.5}, sites=3)


class Model(nn.Module):
    """An owner at the root and a member in each layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.owner = build_owner(case, dtype=torch.float64)
        self.owner.initialise(seeded, {})
        self.layers = nn.ModuleList(Member(self.owner, i) for i in range(case.sites))

    def forward(self, like: Tensor) -> Tensor:
        values = [layer(like) for layer in self.layers]
        return torch.stack([value if isinstance(value, Tensor) else torch.cat(value) for value in values])


@pytest.mark.parametrize("case", [GROUP, SHARED], ids=str)
def test_parameters_are_registered_once(case: Case) -> None:
    model = Model(case)
    assert {name.partition(".")[0] for name in model.state_dict()} == {"owner"}
    assert sum(p.numel() for p in model.parameters()) == case.form.count(case.args, case.dims).trained


@pytest.mark.parametrize("case", [GROUP, SHARED], ids=str)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_one_owner_of_their_own(case: Case, again: object) -> None:
    model = Model(case)
    twin = again(model)  # type: ignore[operator]
    assert all(layer.owner_module is twin.owner for layer in twin.layers)
    assert twin.owner is not model.owner
    twin.eval(), model.eval()
    assert torch.equal(twin(case.like()), model(case.like()))
    twin.owner.get_parameter(next(iter(dict(twin.owner.named_parameters())))).data.add_(1.0)
    assert not torch.equal(twin(case.like()), model(case.like()))


def test_members_follow_the_owner() -> None:
    model = Model(SHARED).eval()
    x = SHARED.like()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x)), "dropout of the owner follows model.train()"
    assert model.to(torch.float32).layers[0](x.float()).dtype == torch.float32
    with torch.no_grad():
        model.eval().owner.up.zero_()
        model.owner.up_bias.zero_()
    assert not model(x.float()).any()


def test_each_site_of_a_group_has_its_own_rows() -> None:
    model = Model(GROUP)
    values = model(GROUP.like())
    assert not torch.equal(values[0], values[1])
    values[1].sum().backward()
    touched = model.owner.up.grad.view(3, -1).abs().sum(1)
    assert (touched > 0).tolist() == [False, True, False]


def test_collapsed_rows_equal_the_group() -> None:
    model, like = Model(GROUP), GROUP.like()
    for layer in model.layers:
        direct = build(Case("prefix", KeyValue(2, 4), None, {"len": 6}), dtype=torch.float64)
        direct.load_state_dict(layer.collapsed())
        assert all(torch.equal(a, b) for a, b in zip(direct(like), layer(like), strict=True))


def test_a_direct_prefix_can_be_shared_too() -> None:
    case = Case("prefix", KeyValue(2, 4), None, {"len": 6}, sites=3)
    model = Model(case)
    assert isinstance(model.owner, EquationModule)
    assert set(model.owner.tensors()) == {"key", "value"}
    assert "up" in Model(GROUP).owner.tensors()
    values = model(case.like())
    assert torch.equal(values[0], values[2])
    assert case.form.count(case.args, case.dims).trained == sum(
        p.numel() for p in build(case, dtype=torch.float32).parameters()
    )


def test_compiles_through_members() -> None:
    model, like = Model(GROUP), GROUP.like()
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(like), model(like))


def test_functional_call_reaches_members() -> None:
    model, like = Model(GROUP), GROUP.like()
    zeros = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    assert not torch.func.functional_call(model, zeros, (like,)).any()
    assert model(like).any()
