"""P6xx: what `peftc.verify` finds."""

from __future__ import annotations

from peftc.diagnostics.code_info import CodeInfo

VERIFICATION: dict[str, CodeInfo] = {
    "P601": CodeInfo(
        "model that cannot be verified",
        "Verification computes with a copy of the model, never with the model itself. A model some of whose weights are on the meta "
        "device (not loaded, or offloaded) has no values to compute with, and some modules refuse to be copied.",
    ),
    "P602": CodeInfo(
        "output that is not what the spec says",
        "The equations of the spec were computed on the base, by hooks on its modules, and the compiled model computes something "
        "else. The edit, the site and the state of the first difference are named, with its size. A module whose `forward` was "
        "replaced after compilation does this, and one module that stands in two layers. If nothing was changed after compilation, "
        "this is a bug in peftc.",
    ),
    "P603": CodeInfo(
        "gradient that is not what the spec says",
        "The outputs agree with the equations, but a parameter has another gradient: a value is detached on its way, or is used "
        "somewhere else, too.",
    ),
    "P604": CodeInfo(
        "edit without effect",
        "The parameters of one edit at one site were changed, the equations say that this moves the output, and the output of the "
        "compiled model stays the same: its code at that site does not run.",
    ),
    "P605": CodeInfo(
        "edit that acts before its site",
        "The parameters of one edit at one site were changed, and a module that runs before this site returns other values.",
    ),
    "P606": CodeInfo(
        "queries, keys or values that are others",
        "The rows of a Linear that are named `attn.q` were changed, and what arrives at the attention as queries did not change, or "
        "not all of it, or keys and values changed as well; likewise for `attn.k` and `attn.v`. The site names the wrong rows or "
        "the wrong module.",
    ),
    "P607": CodeInfo(
        "disabled edits that act",
        "Inside `with peftc.disabled(model):` the model must compute what its base computes, bit for bit.",
    ),
    "P608": CodeInfo(
        "removed edits that leave something behind",
        "After `peftc.remove` the model must be what it was before it was compiled, bit for bit: outputs, classes of modules, "
        "parameters and buffers.",
    ),
    "P609": CodeInfo(
        "fold that changes the model",
        "With the edits that fold in the weights, the model computes something else than before, by more than rounding explains.",
    ),
    "P610": CodeInfo(
        "way of calling that differs",
        "The compiled model agrees with its spec in evaluation mode, and does not in training mode (with dropout 0, or with dropout "
        "as a factor, which shows whether an edit acts before it or behind it), without gradients, or in decoding with a cache.",
    ),
    "P611": CodeInfo(
        "gradient of the base",
        "A parameter that no edit and no `train` statement of the spec names has a gradient after a backward pass.",
    ),
}
