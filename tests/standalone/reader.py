"""Loads saved models where peftc is not installed, and writes what they compute.

    python reader.py FOLDER

FOLDER has a folder for each model, with its inputs beside the weights.
"""

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    sys.modules["peftc"] = None  # type: ignore[assignment]  # every import of it fails
    import torch
    import transformers

    for directory in sorted(path for path in folder.iterdir() if path.is_dir()):
        auto = next(iter(json.loads((directory / "config.json").read_text())["auto_map"]))
        torch.set_num_threads(1)
        model = getattr(transformers, auto).from_pretrained(directory, trust_remote_code=True).eval()
        inputs = torch.load(folder / f"{directory.name}.inputs")
        out = model(**inputs)
        out = out.logits if "logits" in out else out[0]
        out.float().square().sum().backward()
        gradients = {
            name: p.grad for name, p in model.named_parameters() if ".peftc." in name or "peftc_shared" in name
        }
        result = {"out": out.detach(), "gradients": gradients}
        if directory.name.startswith("llama"):
            result["generated"] = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
        if directory.name.startswith("half"):
            result["dtypes"] = sorted({str(p.dtype) for p in model.parameters()})
        torch.save(result, folder / f"{directory.name}.outputs")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
