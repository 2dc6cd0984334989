"""P52x and P53x: saved adapters and folding."""

from __future__ import annotations

from peftc.diagnostics.code_info import CodeInfo

WEIGHTS: dict[str, CodeInfo] = {
    "P520": CodeInfo(
        "no saved adapter there",
        "A saved adapter is a directory with `adapter.json` and the file of tensors that it names, as `peftc.save(model, directory)` "
        "writes them. One of them is not there or cannot be read.",
    ),
    "P521": CodeInfo(
        "damaged adapter",
        "The files of the adapter do not agree: `adapter.json` has the sha256 of the file of tensors, its keys are checked "
        "one by one, and the tensors have the names, shapes and dtypes that it lists. Something was cut off, changed or "
        "exchanged after the adapter was saved. Save it again, or fetch it again.",
    ),
    "P522": CodeInfo(
        "adapter of a newer format",
        "The adapter was saved by a later version of peftc, in a format that this version does not know. Nothing is guessed: "
        "install that version.",
    ),
    "P523": CodeInfo(
        "adapter of another base",
        "What an adapter adds means something only on the model it was trained on. This model has another type, other "
        "parameters or another configuration; the notes say which. The dtype and the device may differ, and so may keys of the "
        "configuration that cannot change the function: names, versions, defaults of `generate`, ids of special tokens, rates of "
        "dropout. A key that one side alone has counts where its value is not the default of its class.",
    ),
    "P524": CodeInfo(
        "adapter of other weights",
        "The model has the architecture that the adapter was saved for, but other values in its weights: another checkpoint, a "
        "head that was initialised at random again, or weights into which something was folded. The edits would be applied to "
        "functions they were not trained on. This is a warning (`peftc.PeftcWarning`, with the code and the distance), and an error "
        "with `strict=True`; `other_weights=True` says that other weights are meant. Compared is a sample of the values of each "
        "parameter, allowing for a cast to another dtype: `adapter.json` has it, and its digest. Parameters that were trained or "
        "quantised are not in it; those that are quantised on this model alone cannot be compared, which `strict` refuses.",
    ),
    "P525": CodeInfo(
        "tensors that do not fit",
        "The spec of the adapter, planned on this model, wants other tensors than those saved: some are missing, left over or "
        "of another shape; or it cannot be planned on this model at all. Where the model has edits already (`peftc.warm_start`, "
        "`peftc.fuse`), what is saved is not what they have: another size, another equation, or parameters for each task.",
    ),
    "P526": CodeInfo(
        "cannot be saved there",
        "An adapter is saved into a new or empty directory, or over an adapter that peftc saved before. Anything else there is "
        "left alone. Or the file system refuses: a full disk, a limit on the size of files, a folder that may not be written to, "
        "another process that does not stop writing there. What was there before still loads.",
    ),
    "P527": CodeInfo(
        "weights are not loaded",
        "Parameters are on the meta device, or fake: they have shapes and no values. Load the model's weights before saving, "
        "loading an adapter or folding.",
    ),
    "P528": CodeInfo(
        "prefix that cannot be saved as rows",
        "A prefix with `reparam` is saved as the rows that its MLP makes, and loads as a direct prefix of the same spec. That "
        "cannot be written down where one edit uses a shared prefix more than once. Save the MLP with `keep=true`.",
    ),
    "P529": CodeInfo(
        "edits are switched off",
        "Inside `with peftc.disabled(model):` the model has the weights of its base. Save and fold outside of the block.",
    ),
    "P530": CodeInfo(
        "folded weights that are not finite",
        "With the edits folded in, a weight would have NaN or infinite entries: training has diverged, or the change is too "
        "large for the dtype of the weight. Nothing was written.",
    ),
    "P531": CodeInfo(
        "edit that does not fold",
        "`peftc.fold(model, only=…)` names an edit that cannot be expressed in the weights of the base; the message names what "
        "prevents it. Nothing was written. Without `only`, everything that folds is folded, and the rest is reported.",
    ),
    "P532": CodeInfo(
        "no edit of that name",
        "`only` names edits and `train` statements of the spec that the model was compiled with; after `apply … as enc`, with "
        "`enc.` before it.",
    ),
    "P533": CodeInfo(
        "no task chosen",
        "The model has edits `per task`, with parameters for several tasks. Which of them act is chosen around the call: "
        "`with peftc.task(model, name): …`.",
    ),
    "P534": CodeInfo(
        "unknown task",
        "Tasks are named where the spec is compiled, `peftc.compile(spec, model, tasks=[…])`, and by `peftc.add_task`.",
    ),
    "P535": CodeInfo(
        "tasks of rows that are not understood",
        "`task_ids` has one whole number for each row of the batch, the place of its task in `peftc.tasks(model)`, or one name for "
        "each: a tensor of integers, or a list. For one task of all rows there is `peftc.task(model, name)`.",
    ),
    "P536": CodeInfo(
        "batch that cannot be of several tasks",
        "Rows of a batch go through the edits of their own tasks. That needs a number for each of them, and edits of hidden states: "
        "a weight or a bias is one for the whole batch.",
    ),
    "P537": CodeInfo(
        "tasks that cannot be",
        "Tasks have names of letters, digits, `_` and `-`, each once, and belong to edits that say `per task`. All specs on a "
        "model have the same tasks; a model with such edits has at least one.",
    ),
    "P540": CodeInfo(
        "entries that have not been chosen",
        "A `sparse` edit trains a few entries of the weights, and `lines` a few rows; `peftc.calibrate` chooses them from data before "
        "training. Until then they have no effect.",
    ),
    "P541": CodeInfo(
        "nothing to choose from",
        "`peftc.calibrate` chooses what selective edits train by what batches say of it: gradients, or the changes that training "
        "makes. There is no such edit, there are no batches, or they give no loss or no gradient.",
    ),
    "P542": CodeInfo(
        "quantised weight that would be trained",
        "A weight that is stored in few bits has no gradient that a step of training could follow. Edits beside it can be trained, "
        "as in QLoRA; so can edits of `w`, which see the values that it stands for.",
    ),
    "P543": CodeInfo(
        "change that has not been pruned",
        "A `masked` edit trains all entries of the weights, and few of them are saved: those that `peftc.calibrate(model)` keeps when it "
        "is called after training. `keep=true` saves everything, so that training can go on.",
    ),
    "P544": CodeInfo(
        "fusion without its adapters",
        "A `fusion` mixes adapters that were trained before, one for each of other tasks. `peftc.fuse(model, directories)` reads them, as "
        "many as its `n` says; until then there is nothing that could be trained to mix them.",
    ),
    "P566": CodeInfo(
        "weights that are offloaded",
        "accelerate keeps weights on the CPU or on disk and loads them for each call of their module. Initial values are read from there; weights "
        "that are trained or folded into, and parameters of edits that were there before the model was dispatched, must be in their places.",
    ),
    "P545": CodeInfo(
        "argument of another kind",
        "A function of peftc was called with an argument of a type, shape or value that it does not take, or with two that exclude each "
        "other; the message says which. Nothing of the model has changed.",
    ),
    "P546": CodeInfo(
        "no room for the old weights",
        "While weights are folded, those of before are kept in a temporary file, so that an error can be undone bit for bit. The disk that "
        "TMPDIR names has no room for them. Nothing of the model has changed.",
    ),
    "P550": CodeInfo(
        "generated file that was changed",
        "A file that `peftc compile -o DIR` wrote earlier is another one now: its hash is not the one in `.peftc.json`, or a link "
        "stands in its place. Nothing was written. `--force` overwrites it; or move it away to keep your changes.",
    ),
    "P551": CodeInfo(
        "file in the way",
        "`peftc compile -o DIR` would write a file where there is one that it did not write. Such a file is never overwritten, "
        "`--force` or not. Nothing was written.",
    ),
    "P539": CodeInfo(
        "step without gradients",
        "`peftc.step` reads how important entries are from their gradients. It is called after `backward()` and before they are set to "
        "zero.",
    ),
    "P538": CodeInfo(
        "no state to fold into",
        '`peftc.fold(model, into="state")` is for prefixes, which become the seed of a cache, and prompts, which become embedded '
        "tokens. A seed needs one prefix of the same length in each layer of a decoder that counts positions as it is told to.",
    ),
    "P560": CodeInfo(
        "seed that is none",
        "A seed is a whole number of the range that `torch.manual_seed` takes, from -2**63 to 2**64 - 1.",
    ),
    "P561": CodeInfo(
        "values that are no numbers",
        "Tensors of the adapter have values that are infinite, or NaN: the training that made them has diverged, or the file "
        "was made by someone else. With them the model would compute nothing but NaN.",
    ),
}
