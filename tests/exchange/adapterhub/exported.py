"""Writes adapters that came from AdapterHub for it again, with what peftc computes with them.

`python -m tests.exchange.adapterhub.exported FOLDER`, for `make adapterhub`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

import peftc
from tests.exchange.adapterhub.models import FOLDER, base, output

# The library counts relative positions from a prefix on, so T5's does not come in. It loads DiReFT
# as NoReFT. Of models with a head for tokens, whether it applies the inverse is not in the folder.
WITH_HEADS = {f"{name}/seq_bn_inv" for name in ("bart", "gpt2", "qwen2", "t5")}
FUSIONS = {"bert/fusion", "gpt2/fusion"}  # which come in alone
CASES = sorted(
    key
    for key in load_file(FOLDER / "outputs.safetensors")
    if not key.endswith("/base") and key != "t5/prefix" and "/direft" not in key and key not in WITH_HEADS | FUSIONS
)


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    outputs = {}
    for key in CASES:
        name = key.partition("/")[0]
        (folder / name).mkdir(parents=True, exist_ok=True)
        peftc.import_adapter(FOLDER / key, folder / "imported", model=base(name))
        model = peftc.load(folder / "imported", base(name))
        peftc.export(model, folder / key, to="adapterhub")
        outputs[key] = output(name, model)
    save_file(outputs, folder / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
