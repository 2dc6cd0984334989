"""The forward of generated classes: it chooses the code that runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

from torch.distributed import is_available, is_initialized

from peftc.modules.form_hooks import GLOBAL_HOOKS, HOOKED_FORMS
from peftc.rewriting.legality.call_hooks import check_hooks
from peftc.sharding.calls import split_call
from peftc.sharding.layouts import LAYOUTS, edits_heads, note_call

# Arguments are passed as they came: decorators of a forward tell positional from keyword ones.
# A bound method may outlive the edits. Each call reads cells of a closure, and looks up no globals.
FORWARD_SOURCE = """\
def forward_of(
    kind, HOOKED_FORMS, forward_hooks, forward_pre_hooks, backward_hooks, backward_pre_hooks,
    EDITS_HEADS, is_initialized, note_call, LAYOUTS, split_call, check_hooks,
):
    def forward(self, *args, **kwargs):
        if getattr(type(self), '_peftc_kind', None) is not kind:
            return type(self).forward(self, *args, **kwargs)
        off = self.peftc_choice.off
        own = kind.without(off) if off else kind
        if HOOKED_FORMS or forward_hooks or forward_pre_hooks or backward_hooks or backward_pre_hooks:
            own = own.for_hooks_of(self)
        if own.entered_names:
            check_hooks(self, own.entered_names)
        if EDITS_HEADS and is_initialized() and 'peftc_layout' not in self.__dict__:
            note_call(self)
        if LAYOUTS and 'peftc_layout' in self.__dict__:
            return split_call(own.dispatch, self, args, kwargs)
        return own.dispatch(self, *args, **kwargs)

    return forward
"""


@cache
def _forward_code(name: str) -> CodeType:
    return compile(FORWARD_SOURCE, f"<peftc {name}>", "exec")


def forward_of(kind: Any) -> Callable[..., Any]:
    """The forward of a `GeneratedClass`."""
    namespace: dict[str, Any] = {}
    exec(_forward_code(kind.name), namespace)
    watched = is_available() and edits_heads(kind)
    return namespace["forward_of"](
        kind, HOOKED_FORMS, *GLOBAL_HOOKS.values(), watched, is_initialized, note_call, LAYOUTS, split_call, check_hooks
    )
