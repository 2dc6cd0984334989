"""Skeletons are put into evaluation as `eval()` does it, whatever a class makes of that."""

from torch import nn

from peftc.modules.walk import set_eval
from tests import zoo


class Frozen(nn.Linear):
    def train(self, mode: bool = True) -> "Frozen":
        self.asked = mode
        return super().train(True)


def test_all_modules_are_in_evaluation() -> None:
    assert not any(module.training for module in set_eval(zoo.build("llama").train()).modules())


def test_a_class_decides_about_its_mode() -> None:
    module = Frozen(2, 2)
    set_eval(nn.Sequential(module, nn.ReLU()))
    assert module.training
    assert module.asked is False
