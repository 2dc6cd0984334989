"""What of P2xx concerns a model as a whole, P4xx: rewriting and installing, P9xx: bugs."""

from __future__ import annotations

from peftc.diagnostics.code_info import CodeInfo

REWRITE: dict[str, CodeInfo] = {
    "P207": CodeInfo(
        "unknown hidden state of a region",
        "`region.state(name)` takes the name of one hidden state, such as `ffn.h`; the whole path where the end of it would do "
        "for several.",
    ),
    "P209": CodeInfo(
        "site outside the layers",
        "`peftc.trace` shows layers as graphs. Embeddings, final norms and heads are whole modules outside of them: they can be "
        "edited, but there is no layer to show.",
    ),
    "P210": CodeInfo(
        "edit that does not reach a region",
        "`peftc.rewrite(region, edits)` inserts edits into one layer. None of these edits has a site in it.",
    ),
    "P213": CodeInfo(
        "edit written into the code of a shared module",
        "Two layers share a module, and one edit changes it in both. Another edit is of one of these layers alone, and has to be written "
        "into the code of the shared module where this layer calls it: the two cannot be put together.",
    ),
    "P401": CodeInfo(
        "no module contains the edit",
        "An edit is inserted into the smallest module whose forward computes every state it reads and writes. There is none "
        "here: the states live in modules that only the whole model contains.",
    ),
    "P402": CodeInfo(
        "attention without a mask for prefixes",
        "Keys and values of a prefix need columns in the attention mask that every query may see. This implementation of "
        "attention takes no such mask; `sdpa`, `eager` and `flex_attention` do.",
    ),
    "P403": CodeInfo(
        "state missing in a call pattern",
        "The layer was analysed in one call. In this call the model takes another way through its code, on which the state that "
        "the edit names is not computed, or on which what was one value there is several: an optional argument may put an operation in "
        "between. A `sample` with such arguments lets the layer be analysed in that call.",
    ),
    "P404": CodeInfo(
        "weight that the forward does not read",
        "An edit of `w` or `b` replaces what the forward of the module reads. This forward does not read it where it was expected.",
    ),
    "P405": CodeInfo(
        "state that is computed too late",
        "An equation can read what is computed before the state it writes, not after it.",
    ),
    "P406": CodeInfo(
        "decision on a value",
        "The code of the model decides by the value of a tensor which way to go, and that value is only known while it runs. "
        "The generated forward cannot decide the same way.",
    ),
    "P407": CodeInfo(
        "call that cannot be traced",
        "The model's own code did something in this call that cannot be recorded. A smaller region may leave that code alone.",
    ),
    "P408": CodeInfo(
        "decision that changed while a layer ran",
        "Which variant of a generated forward runs is decided before it runs. A decision of the model's code came out otherwise "
        "in the middle of it; running on would have computed something wrong.",
    ),
    "P409": CodeInfo(
        "edited model that does not run",
        "After installing, a copy of the model without data is run once. It failed in a way that the shapes known to the planner "
        "do not show; the edits have been taken out again.",
    ),
    "P410": CodeInfo(
        "model without edits",
        "The model was not compiled by peftc, or its edits have been removed: there is nothing to save, fold, disable or remove.",
    ),
    "P411": CodeInfo(
        "name of edits that is taken",
        "Edits are registered in the modules that they change under the name `peftc`. One of these modules has something of that "
        "name already, which peftc did not put there.",
    ),
    "P412": CodeInfo(
        "name that the model has already",
        "A model may have several specs, each compiled or loaded after the other. Edits are saved by their names, so no two specs "
        "on one model have an edit of the same name; `peftc.compile(spec, model, prefix=\"b\")` calls the edits of the new one "
        "`b.qv` and so on, as `apply … as b` does. The specs have different names, too: `name=\"b\"`.",
    ),
    "P413": CodeInfo(
        "no spec of that name",
        "`name` says which of the specs on a model is meant: `peftc.specs(model)` lists them. A spec is called as its file, an "
        "adapter as its directory, unless `name` was given when it was put on the model.",
    ),
    "P414": CodeInfo(
        "parameter that two specs train",
        "A parameter of the base is trained by one spec on the model at most: otherwise nobody could say whose value it has when "
        "one of them is removed or saved. In one spec two `train` statements may name the same parameter.",
    ),
    "P415": CodeInfo(
        "keys and values that cannot be changed",
        "Where a model writes its attention out, with a product, a softmax and another product, rows can be joined to the keys and "
        "values (`kv = concat(prefix(len=30), kv)`), but those that are there cannot be changed in the same place: edit "
        "`attn.k` and `attn.v`.",
    ),
    "P416": CodeInfo(
        "edit where gradients are off",
        "The model's own code computes the state inside of `with torch.no_grad()`, so nothing that is computed there is "
        "differentiated: the edit would act, and its parameters would never change. Edit a state outside of that block.",
    ),
    "P417": CodeInfo(
        "branch that was not traced",
        "The model's code decides in the middle of a layer which way to go. Both ways are traced with the first call of a kind; "
        "with the values of that call the other way did not run, or had nothing to edit. This call goes there.",
    ),
    "P418": CodeInfo(
        "tokens that cannot be joined",
        "A prompt is joined to the embedded tokens where a stack of layers takes them, as `inputs_embeds`. No module around these layers "
        "does, or the edit does something else besides. Or the stack needs more of a token than its embedding, which the rows of a prompt "
        "do not have: its id, to look up or to scale something else, a mask that the model makes for the layers, or another value beside "
        "each token. Or it returns more than one state of each token.",
    ),
    "P419": CodeInfo(
        "call that has no place for a prompt",
        "The tokens of a prompt come before those of the input in masks, positions and caches. Other values of each token, masks that "
        "were made for the layers, a stack that returns the tokens of an image besides, "
        "caches of a fixed size, and caches of an earlier call that are given to `generate`, which counts their tokens itself, leave no "
        "place for them; of a cache that does not tell whether it has tokens nobody knows if they are in it. The call was not run.",
    ),
    "P420": CodeInfo(
        "output that cannot be written",
        "`peftc compile -o DIR` writes into a folder that is new or empty, or that it has written before: then `.peftc.json` in it "
        "lists the files with their hashes. The folder given has other files and no such list, or the file system refuses. No file "
        "has been changed.",
    ),
    "P421": CodeInfo(
        "checkpoint that loses a gradient",
        "A layer with a `ladder` or a `layer_attention` runs again for its gradients, and what it was handed from below has none: reentrant "
        "gradient checkpointing runs a layer without gradients first, and cannot see a state that does not go through the "
        "layer's arguments. `use_reentrant=False`, the default of transformers and PyTorch, keeps it. Or another forward has run "
        "before `backward`: what the layer was handed in the first one is gone.",
    ),
    "P422": CodeInfo(
        "positions that nothing tells",
        "A form with `first` or `last` acts on some tokens of a sequence. The stack that takes the tokens tells it which: it must have "
        "a module that takes `inputs_embeds`, the same for all sites that share the form, without a prompt joined to its tokens or an edit "
        "of what it takes or gives, and the site must have the tokens of this stack.",
    ),
    "P423": CodeInfo(
        "call whose positions are not known",
        "A form with `first` or `last` acts on some tokens of a sequence. From this call it cannot be told which: the mask was made for "
        "the layers, a row holds several sequences, the layer was run outside of its stack (as gradient checkpointing does), the call "
        "continues the state of a recurrence, which does not count, or it has a cache, so that its last token is not that of the sequence. Nothing wrong has been computed.",
    ),
    "P424": CodeInfo(
        "forward of an instance that hides the code",
        "Somebody has assigned `module.forward = …`, which runs in the place of the forward of the module's class. A method of the module is "
        "edited as its code. A hook or wrapper that calls the forward which it has replaced stays, and calls the edited one. Of any other "
        "function it cannot be told whether it calls the code that is edited; nothing has been changed.",
    ),
    "P425": CodeInfo(
        "forward that would hide an edit",
        "A `forward` that is assigned to an edited module must call the one that it replaces, as hooks do: another one would run without "
        "the edits, and nobody would notice. It has not been assigned.",
    ),
    "P426": CodeInfo(
        "hook that an edit leaves out",
        "The edit enters the code of a module in which a hook (accelerate's, a wrapper of `forward`) runs around that code, or a hook loads the "
        "parameters of everything in the module by name. The hook would not run, or would not know the parameters of edits. "
        "Hooks that only move arguments to the device on which they are already may be left out.",
    ),
    "P427": CodeInfo(
        "module of compiled code",
        "The code of a scripted or exported module (torch.jit, torch.fx, torch.export) is not that of a class, of which another could be derived. "
        "Edit the model first, and script or export it then.",
    ),
    "P431": CodeInfo(
        "block left in another context",
        "`with peftc.disabled(model)` and `with peftc.task(model, ...)` choose for the context in which they are entered: a thread, "
        "or a coroutine. This block was left in another one, as happens when a generator that is inside of a block is closed "
        "elsewhere. The context that entered it still has its choice.",
    ),
    "P432": CodeInfo(
        "parameter that is read elsewhere",
        "Inside of `peftc.disabled`, base parameters that `train` has changed have their first values. A module that keeps a "
        "parameter in a list besides, as recurrent ones do, would not see that value.",
    ),
    "P428": CodeInfo(
        "prompt behind padding in a cache",
        "A prompt stands directly before the first token of its row, behind the padding. Here the cache has nothing but padding of a row, "
        "whose first token comes now: its prompt is in the cache already, before the padding. Begin with a call that has at least one "
        "token of each row, as `generate` does.",
    ),
    "P435": CodeInfo(
        "parameters that code around the layers reads itself",
        "Outside of the layers, some code reads the weight of the module to be edited, or hands the module to other code: it may compute "
        "with the weight in the place of calling the module, and the edit would not act. In a layer such code is edited as a whole; outside "
        "of the layers only modules are.",
    ),
    "P436": CodeInfo(
        "edited module that was replaced",
        "Edits are in the modules that they were compiled into. What is assigned in the place of such a module has none of them, "
        "so the next call of the model and the next operation on it are refused, and change nothing. Put the edited module back, or take "
        "the edits out first: `peftc.remove` restores what is left of the model. A module that has the edited one inside (a wrapper) can be "
        "called; operations that name parameters want the edited module at its own place. A call of a part of the model asks nothing.",
    ),
    "P900": CodeInfo(
        "unexpected error",
        "Something in peftc failed in a way that nobody thought of. That is a bug: please report it with the command, the spec, "
        "the model, and the traceback that `PEFTC_TRACEBACK=1` shows.",
    ),
    "P901": CodeInfo(
        "forward that does not know its own call",
        "A forward was generated for a call, and its conditions do not hold for that call. That is a bug: please report the "
        "model, the spec and the call. Nothing wrong has been computed.",
    ),
}  # fmt: skip
