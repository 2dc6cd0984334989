"""Random lives of a model: after every operation it computes what a fresh model computes that gets
the same edits, with the same values, at once.
"""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests import zoo
from tests.laws.harness import Before, close

STEPS = 32
KINDS = {  # E: a name of its own
    "lora": "edit E at layer[*].attn.q PER_TASK { h += lora(x, r=2) }",
    "sequential": "edit E at layer[*].ffn PER_TASK { h += adapter(h, r=3, act=relu) }",
    "scales": "edit E at layer[*].attn.v PER_TASK { h *= vector(init=1) }",
    "weights": "edit E at layer[*].attn.o { w = magnitude(w + lowrank(r=2)) }",
    "prefix": "edit E at layer[*].attn PER_TASK { kv = concat(prefix(len=2), kv) }",
    "shared": "form F_E(x, r) { param A[r, d(x)] per edit = kaiming\nparam B[d(out), r] per edit = normal\n"
    "f = B @ A @ x }\nedit E at layer[*].ffn { h += F_E(x, r=2) }",
    "trained": "train E = [b] at layer[*].attn.{q, v}",
    "both": "edit E at layer[*].ffn.down { h += lora(x, r=2) }\ntrain E_b = [b] at layer[*].ffn.down",
}
FOLDS = ("lora", "scales", "weights", "both")
TRAINS = ("trained", "both")
ONCE = ("weights", "prefix", *TRAINS)  # two of a kind would undo each other


def text(kind: str, edit: str, per_task: bool) -> str:
    named = re.sub(r"\bE\b|(?<=F_)E|\bE(?=_)", edit, KINDS[kind])
    return f"peft 2\n{named}".replace("PER_TASK ", "per task " if per_task else "")


@dataclass
class Edits:
    """A spec, or an attached adapter, and its values by the names under which they are saved."""

    kind: str
    edit: str
    per_task: bool = False
    is_off: bool = False
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def values_of(self, edit: str, task: str | None) -> dict[str, Tensor]:
        """Those of a task, under the names of an edit of another name."""
        own: dict[str, Tensor] = {}
        for name, value in self.values.items():
            before, separator, after = name.partition(".tasks.")
            if not separator or after.split(".")[0] == task:
                short = f"{before}.{after.partition('.')[2]}" if separator else name
                own[re.sub(rf"(?<![a-z]){self.edit}(?!\d)", edit, short)] = value
        return own


class Life:
    """A model, and what it should be."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.name, self.folder, self.random = name, folder, random.Random(seed)
        self.base = zoo.build(name, torch.float64).eval()
        self.model = copy.deepcopy(self.base)
        self.before = Before.of(self.model)
        self.specs, self.adapters = dict[str, Edits](), dict[str, Edits]()
        self.saved: list[tuple[Path, Edits]] = []
        self.active: str | None = None
        self.tasks: list[str] = []
        self.task: str | None = None
        self.count, self.log = 0, list[str]()
        self.generator = torch.Generator().manual_seed(seed)

    # What the model should compute -------------------------------------------------------------

    def logits(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(**zoo.inputs(self.name, model)).logits

    def expected(self, acting: Collection[Edits], task: str | None = None) -> Tensor:
        model = copy.deepcopy(self.base)
        for i, one in enumerate(acting):
            peftc.compile(text(one.kind, f"q{i}", False), model, seed=0, name=f"q{i}")
            parameters, values = peftc.parameters(model, f"q{i}"), one.values_of(f"q{i}", task or self.task)
            assert parameters.keys() == values.keys()
            for name, parameter in parameters.items():
                parameter.data.copy_(values[name])
        return self.logits(model)

    def acting(self, *, without: Edits | None = None, adapter: str | None = None) -> list[Edits]:
        own = [one for one in self.specs.values() if not one.is_off and one is not without]
        return own if adapter is None else [*own, self.adapters[adapter]]

    def check(self) -> None:
        close(self.logits(self.model), self.expected(self.acting(adapter=self.active)))
        for name, one in {**self.specs, **self.adapters}.items():
            parameters = peftc.parameters(self.model, name)
            assert parameters.keys() == one.values.keys()
            assert all(torch.equal(parameters[key], value) for key, value in one.values.items())
        if self.specs or self.adapters:
            trained = {n.partition("/")[2] for one in self.specs.values() if one.kind in TRAINS for n in one.values}
            own = dict(self.model.named_parameters(remove_duplicate=False))
            for name, parameter in self.base.named_parameters():
                assert own[name].requires_grad == (name in trained)
                assert name in trained or torch.equal(own[name], parameter)
        else:
            self.before.assert_same(self.model)

    # Operations --------------------------------------------------------------------------------

    def new_name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def noise(self, parameter: Tensor) -> Tensor:
        return 0.1 * torch.randn(parameter.shape, generator=self.generator, dtype=parameter.dtype)

    def read(self, name: str) -> dict[str, Tensor]:
        return {key: value.detach().clone() for key, value in peftc.parameters(self.model, name).items()}

    def train(self, name: str, one: Edits) -> None:
        for parameter in peftc.parameters(self.model, name).values():
            parameter.data += self.noise(parameter)
        one.values = self.read(name)

    def compile(self) -> None:
        kind, edit, name = self.random.choice([*KINDS]), self.new_name("e"), self.new_name("spec")
        one = Edits(kind, edit, per_task="PER_TASK" in KINDS[kind] and self.random.random() < 0.3)
        everything = [*self.specs.values(), *self.adapters.values()]
        clashes = kind in ONCE and any(other.kind == kind for other in everything)
        if clashes or any(other.is_off for other in everything):
            with pytest.raises(peftc.PeftcError, match=r"P302|P414|P529"):
                peftc.compile(text(kind, edit, one.per_task), self.model, name=name)
            return
        first = one.per_task and not self.tasks
        tasks = ["a", "b"] if first else None
        peftc.compile(text(kind, edit, one.per_task), self.model, seed=0, name=name, tasks=tasks)
        if first:
            self.tasks, self.task = ["a", "b"], "a"
            peftc.set_task(self.model, "a")
        self.specs[name] = one
        self.train(name, one)

    def train_one(self) -> None:
        everything = {**self.specs, **self.adapters}
        if everything:
            name = self.random.choice([*everything])
            self.train(name, everything[name])

    def remove(self) -> None:
        if not self.specs or any(one.is_off for one in self.specs.values()):
            return
        if self.random.random() < 0.2:
            peftc.remove(self.model)
            self.specs, self.adapters = {}, {}
        else:
            name = self.random.choice([*self.specs])
            peftc.remove(self.model, name)
            del self.specs[name]
        self.forget()

    def forget(self) -> None:
        if not any(one.per_task for one in self.specs.values()):
            self.tasks, self.task = [], None
        if self.active not in self.adapters:
            self.active = None

    def switch(self) -> None:
        if self.specs:
            name = self.random.choice([*self.specs])
            self.specs[name].is_off = not self.specs[name].is_off
            peftc.set_enabled(self.model, not self.specs[name].is_off, name)

    def disable(self) -> None:
        if not self.specs:
            return
        name = self.random.choice([*self.specs])
        with peftc.disabled(self.model, name):
            others = self.acting(without=self.specs[name], adapter=self.active)
            close(self.logits(self.model), self.expected(others))
        with peftc.disabled(self.model):
            assert torch.equal(self.logits(self.model), self.logits(self.base))

    def copy(self) -> None:
        old, how = self.model, self.random.choice(["deepcopy", "pickle", "state"])
        if how == "state":
            state = copy.deepcopy(old.state_dict())
            for parameter in old.parameters():
                parameter.data += 1
            old.load_state_dict(state)
            return
        self.model = copy.deepcopy(old) if how == "deepcopy" else pickle.loads(pickle.dumps(old))
        for parameter in old.parameters():
            parameter.data.zero_()

    def save(self) -> None:
        if not self.specs or any(one.is_off for one in self.specs.values()):
            return
        name = self.random.choice([*self.specs])
        one = self.specs[name]
        folder = peftc.save(self.model, self.folder / self.new_name("saved"), name)
        loaded = peftc.load(folder, copy.deepcopy(self.base), name="loaded")
        assert {k: v.tolist() for k, v in peftc.parameters(loaded).items()} == {
            k: v.tolist() for k, v in one.values.items()
        }
        if not one.per_task:
            self.saved.append((folder, replace(one, values=dict(one.values))))

    def attach(self) -> None:
        known = [(one.kind, None) for one in self.specs.values()] + [(o.kind, o.edit) for o in self.adapters.values()]
        taken = [pair for pair in known if pair[0] in ONCE]
        fits = [(f, one) for f, one in self.saved if all(k != one.kind or edit == one.edit for k, edit in taken)]
        if not fits or len(self.adapters) > 2 or any(one.is_off for one in self.specs.values()):
            return
        folder, one = self.random.choice(fits)
        name = self.new_name("adapter")
        peftc.attach(folder, self.model, name=name, other_weights=True)
        self.adapters[name] = replace(one, values=dict(one.values))

    def choose(self) -> None:
        if not self.adapters:
            return
        self.active = self.random.choice([None, *self.adapters])
        peftc.activate(self.model, self.active)
        name = self.random.choice([None, *self.adapters])
        with peftc.adapter(self.model, name):
            close(self.logits(self.model), self.expected(self.acting(adapter=name)))

    def detach(self) -> None:
        if self.adapters and not any(one.is_off for one in self.specs.values()):
            name = self.random.choice([*self.adapters])
            peftc.detach(self.model, name)
            del self.adapters[name]
            self.forget()

    def fold(self) -> None:
        fits = [name for name, one in self.specs.items() if one.kind in FOLDS and not one.per_task]
        if not fits or self.adapters or any(one.is_off for one in self.specs.values()):
            return
        name, want = self.random.choice(fits), self.logits(self.model)
        one = self.specs[name]
        report = peftc.fold(self.model, name=name)
        close(self.logits(self.model), want)
        if {fold.edit for fold in report.folded} < {n.partition("/")[0] for n in one.values}:
            self.specs[name] = one  # another edit stands before it
            one.values = self.read(name)
        else:
            del self.specs[name]
        trained = {n.partition("/")[2] for one in self.specs.values() for n in one.values}
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for key, parameter in self.base.named_parameters():
            if key not in trained:
                parameter.data.copy_(own[key])
        self.before = Before.of(self.base)
        self.forget()

    def change_tasks(self) -> None:
        if not self.tasks or any(one.is_off for one in self.specs.values()):
            return
        if len(self.tasks) > 2:
            peftc.drop_task(self.model, self.tasks.pop(0))
            self.task = self.tasks[0]
        else:
            self.task = self.new_name("task")
            peftc.add_task(self.model, self.task, like=self.random.choice([None, *self.tasks]))
            self.tasks.append(self.task)
        peftc.set_task(self.model, self.task)
        for name, one in self.specs.items():
            one.values = self.read(name)

    def change_base(self) -> None:
        trained = {n.partition("/")[2] for one in (*self.specs.values(), *self.adapters.values()) for n in one.values}
        name = self.random.choice([name for name, _ in self.base.named_parameters() if name not in trained])
        parameter = dict(self.base.named_parameters())[name]
        parameter.data += self.noise(parameter)
        dict(self.model.named_parameters(remove_duplicate=False))[name].data.copy_(parameter)
        self.before = Before.of(self.base)

    def step(self) -> None:
        operations = [self.compile] * 4 + [self.save, self.attach, self.choose, self.disable, self.disable] * 2
        operations += [self.train_one, self.remove, self.switch, self.switch, self.copy, self.detach]
        operations += [self.fold, self.change_tasks, self.change_base]
        operation = self.random.choice(operations)
        self.log.append(operation.__name__)
        operation()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["bert", "bart"])
def test_every_operation_leaves_the_edits_that_it_should(name: str, seed: int, tmp_path: Path) -> None:
    life = Life(name, seed, tmp_path)
    for _ in range(STEPS):
        life.step()
        life.check()
