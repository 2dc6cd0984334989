"""The quantiser of a model that transformers has quantised, as a compiled model shows it.

`Trainer` refuses a model that is quantised and has neither adapters of PEFT nor a quantiser with
`is_qat_trainable`. The edits of a compiled model are trained, so its quantiser says that it is.
Whether gradients pass through the quantised weights is asked of the quantiser as ever.
"""

from functools import cache
from typing import Any

QUANTIZER = "hf_quantizer"  # transformers' name


@cache
def _trainable(cls: type[Any]) -> type[Any]:
    names = {part: getattr(cls, part) for part in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), {**names, "is_qat_trainable": True})


def _get(self: Any) -> Any:
    if QUANTIZER not in vars(self):
        raise AttributeError(QUANTIZER)
    own = vars(self)[QUANTIZER]
    if own is None:
        return None
    view = object.__new__(_trainable(type(own)))
    view.__dict__ = own.__dict__
    return view


def _set(self: Any, value: Any) -> None:
    vars(self)[QUANTIZER] = value


def _delete(self: Any) -> None:
    del vars(self)[QUANTIZER]


trainable_quantizer = property(_get, _set, _delete, "The quantiser, with `is_qat_trainable`.")
