"""Planning from Python: what would a method cost on models of very different size? No weights, no
network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peftc

LORA = Path(__file__).resolve().parent.parent / "specs" / "lora.peft"
SPEC = """
peft 1

method lora_all(r = 16) {
    edit attn at layer[*].attn.q | layer[*].attn.k | layer[*].attn.v | layer[*].attn.o { h += lora(x, r=r, alpha=32) }
    edit ffn  at layer[*].ffn.up | layer[*].ffn.down { h += lora(x, r=r, alpha=32) }

    expect foldable(attn)
    expect stored <= 2%
}
"""


def main() -> None:
    print(f"{'model':32}{'base':>18}{'stored':>14}{'':>9}  expectations")
    for name in ("bert-base-uncased", "gpt2", "facebook/bart-large", "t5-3b", "meta-llama/Meta-Llama-3-70B"):
        plan = peftc.plan(SPEC, name)
        base, stored = plan.totals.base, plan.totals.stored
        expectations = ", ".join(f"{e.text}: {'holds' if e.holds else 'fails'}" for e in plan.expectations)
        print(f"{name:32}{base:18,}{stored:14,}{stored / base:9.3%}  {expectations}")

    plan = peftc.plan(LORA, "gpt2")  # its q, k and v are one matrix: the plan says where each lies
    edit = plan.edits[0]
    print(f"\n{edit.name} on gpt2: {len(edit.sites)} sites, the first {edit.sites[0].path} in {edit.sites[0].module}")
    print(f"folds: {edit.foldable} ({edit.reason})")

    try:
        peftc.plan(SPEC.replace("ffn.down", "ffn.dwn"), "gpt2")
    except peftc.PeftcError as error:
        print(f"\n{error}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
