"""An adapter of PEFT, cached from the hub, into peftc, trained further, and back to PEFT and vLLM.

python examples/workflows/exchange.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from models import bases
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import peftc

HUB_ID, REVISION = "user/tuned-llama", "0123456789abcdef0123456789abcdef01234567"
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def run(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "peftc", *map(str, arguments)], check=True)


def cache(folder: Path) -> Path:
    """The folder of `HUB_ID` in a cache of the hub, as a download leaves it."""
    repository = folder / f"models--{HUB_ID.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    return repository / "snapshots" / REVISION


def main(folder: Path) -> None:
    base = folder / "llama"

    def model() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(base).eval()

    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True, task_type="CAUSAL_LM")
    theirs = get_peft_model(model(), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(cache(folder / "hub"))
    os.environ["HF_HUB_CACHE"] = str(folder / "hub")

    run("import", HUB_ID, "-o", folder / "ours")
    ours = peftc.load(folder / "ours", model())
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits)

    optimizer = torch.optim.AdamW(peftc.parameters(ours).values(), lr=0.01)
    for _ in range(3):
        ours(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peftc.save(ours, folder / "further")

    run("export", folder / "further", "--to", "peft", "-o", folder / "for-peft")
    back = PeftModel.from_pretrained(model(), str(folder / "for-peft")).eval()
    torch.testing.assert_close(back(IDS).logits, ours(IDS).logits)

    run("export", folder / "further", "--to", "vllm", "--max-rank", 8, "-o", folder / "for-vllm")
    written = json.loads((folder / "for-vllm" / "adapter_config.json").read_text())
    assert written["r"] == 4
    assert sorted(written["target_modules"]) == ["q_proj", "v_proj"]
    print("exchange: the adapters of PEFT and peftc agree")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        bases(Path(work))
        main(Path(work))
