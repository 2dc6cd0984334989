"""The hand-written layers without edits are the originals, bit for bit; the table's names exist."""

import pytest
import torch
from torch import nn

from tests import zoo
from tests.reference import table
from tests.reference.layers import open_up
from tests.reference.reference import Reference


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", zoo.ALL)
def test_hand_written_layers_compute_what_the_originals_do(name: str, training: bool) -> None:
    model = zoo.build(name, dropout=0.2).train(training)
    inputs = zoo.inputs(name, model, padding="right")
    torch.manual_seed(0)
    want = model(**inputs)[0]
    for site in (*table.attentions(name, model), *table.ffns(name, model)):
        open_up(model.get_submodule(site.edit_module))
    torch.manual_seed(0)
    assert torch.equal(model(**inputs)[0], want)


@pytest.mark.parametrize("name", zoo.ALL)
def test_every_edit_runs_and_reads_its_states(name: str) -> None:
    ref = Reference(name, zoo.build(name, torch.float64))
    states: dict[str, object] = {}
    for site in (*ref.attentions, *ref.ffns):

        def look(at, path=site.path):
            states[path] = at
            return at.h

        ref.h(site, look)
    inputs = zoo.inputs(name, ref.model)
    ref.model(**inputs)
    assert len(states) == len(ref.attentions) + len(ref.ffns)
    post = name.startswith(("bart", "bert", "roberta"))
    for at in states.values():
        assert at.h.ndim == 3
        same = torch.equal(at.x, at.res)
        assert same == post
        if not post:
            assert torch.equal(at.norm(at.res), at.x)


@pytest.mark.parametrize("name", zoo.ALL)
def test_the_table_names_linears_and_norms(name: str) -> None:
    model = zoo.build(name)
    for layer in table.layers(name, model):
        for a in layer.attentions:
            q, k, v, o = (model.get_submodule(r.module) for r in (a.q, a.k, a.v, a.o))
            assert all(hasattr(m, "weight") for m in (q, k, v, o))
            assert "norm" in type(model.get_submodule(a.norm)).__name__.lower()
        assert all(isinstance(model.get_submodule(layer.ffn.down.module), nn.Module) for _ in "d")
