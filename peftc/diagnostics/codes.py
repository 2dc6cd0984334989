"""Every diagnostic code: its title and its explanation, as `peftc explain CODE` prints them. A code is never reused."""

from __future__ import annotations

from peftc.diagnostics.code_info import CodeInfo
from peftc.diagnostics.codes_names import NAMES
from peftc.diagnostics.codes_plan import PLAN
from peftc.diagnostics.codes_rewrite import REWRITE
from peftc.diagnostics.codes_syntax import SYNTAX
from peftc.diagnostics.codes_verification import VERIFICATION
from peftc.diagnostics.codes_weights import WEIGHTS

CODES: dict[str, CodeInfo] = {
    **SYNTAX,
    **NAMES,
    **PLAN,
    **REWRITE,
    **WEIGHTS,
    **VERIFICATION,
    # P31x: a form where it cannot stand
    "P310": CodeInfo(
        "form out of place",
        "Each form reads and writes states of certain shapes: `adapter(x)` and `lora(x)` hidden states [batch, tokens, d], "
        "`bottleneck(q)` attention heads, `lowrank` and `magnitude` weights, `prefix` keys and values. Here the state that the "
        "equation writes, or the value given, has another shape.",
    ),
    "P311": CodeInfo(
        "rank too high",
        "A product of two thin matrices between d_in and d_out features has at most rank min(d_in, d_out). A higher `r` adds "
        "parameters and nothing else. (The bottleneck of an `adapter` has an activation, so its `r` is free.)",
    ),
    "P312": CodeInfo(
        "arguments that do not go together",
        "`adapter` takes its width as `r` or as `reduction`, exactly one of them, and `reduction` leaves at least one "
        "feature; `keep` belongs to a prefix with `reparam`, `std` to one without; the MLP of `reparam` has at least one hidden "
        "feature. An `svd` that gives up ranks has a `target` and a `total`.",
    ),
    "P313": CodeInfo(
        "size that does not divide",
        "Sums of Kronecker products, blocks of a rotation and groups cut features into equal parts, so their number or size divides "
        "the number of features.",
    ),
    "P314": CodeInfo(
        "prompt that is too long",
        "The tokens of a prompt take positions of the model, and at least one has to be left for the input.",
    ),
    "P315": CodeInfo(
        "form that ends before its stack",
        "`ladder` and `layer_attention` hand a state from layer to layer, and their value enters the last layer of the stack: the "
        "selector must reach that layer. A stack whose layers are one layer that runs several times has no place for the "
        "states between.",
    ),
    "P316": CodeInfo(
        "fewer numbers than factors",
        "`fastfood(d, scaled=true)` trains d numbers in all: a factor for each layer, and what is left for the vector that is projected. "
        "So d exceeds the number of layers, where each module outside of layers counts as one.",
    ),
    # P5xx: the model, its weights, saved adapters
    "P501": CodeInfo(
        "unknown model",
        "A model is named by a local folder, the path of a config.json, an id of peftc's catalogue, or an id on the hub. The "
        "name given is none of the first three, its config.json is not in the hub cache, and the hub could not be asked or "
        "does not have it. For planning, a config.json is all that is needed.",
    ),
    "P502": CodeInfo(
        "no configuration there",
        "The name looks like a path, but there is no such file or folder, or the folder (or hub repository) has no config.json.",
    ),
    "P503": CodeInfo(
        "unusable configuration",
        "The configuration is not JSON, names no model type or one that the installed transformers does not know, names a "
        "model class that transformers does not have, or has values that its configuration class refuses.",
    ),
    "P504": CodeInfo(
        "model needs code from its repository",
        "The configuration points to Python files of its repository (`auto_map`), and transformers has no class for this model. "
        "Such code is never run unless you say so: `--trust-remote-code` on the command line, `trust_remote_code=True` in "
        "Python. It can do whatever you can do; read it first. Or build the model yourself and pass it: `peftc.plan(spec, model)` "
        "and `peftc.compile(spec, model)` take any nn.Module.",
    ),
    "P505": CodeInfo(
        "weights missing",
        "The command needs weights, and there are none: the model is only a configuration, the folder has no "
        "model.safetensors, or they are not in the hub cache and the hub may not be asked. Pickled weights (.bin) are not read, "
        "because reading them runs code. Planning needs no weights.",
    ),
    "P506": CodeInfo(
        "model cannot be built",
        "The model class refuses the configuration: usually two values that do not fit together, such as a width that the "
        "number of heads does not divide.",
    ),
    "P507": CodeInfo(
        "no sample input",
        "Tracing runs the model once on fake inputs, made from its `main_input_name` and its configuration. This model's input "
        "is of another kind: give one with `sample={name: tensor}`.",
    ),
    "P508": CodeInfo(
        "weights do not fit",
        "A file of weights is damaged, or its tensors have other shapes than the configuration beside it says.",
    ),
    "P509": CodeInfo(
        "model that does not run",
        "To find its sites, a model is copied without its data and run once, on its sample. Its own code failed: the note says "
        "how. A sample is a dictionary of the arguments of `forward`, as in `model(**sample)`.",
    ),
    "P510": CodeInfo(
        "code of a repository that fails",
        "The code that comes with the configuration was run, as you allowed, and raised an error: a file or a package is "
        "missing, or it was written for another version of transformers.",
    ),
    "P511": CodeInfo(
        "name of a module that cannot be written",
        "A module or parameter has half of a surrogate pair in its name. Such a name is no text: no file could hold it, "
        "so no spec could name the module and no adapter of it could be saved. Or a module has the name of an attribute of the module that "
        "holds it, such as `forward`: whoever writes it gets the attribute.",
    ),
}
