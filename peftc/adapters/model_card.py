"""The model card (README.md) of an adapter on the hub."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from huggingface_hub import ModelCardData

from peftc.adapters.metadata import Adapter

LIBRARY = "peftc"
Evaluation = Mapping[str, float | str]


def model_card(
    adapter: Adapter,
    repo_id: str,
    evaluation: Evaluation,
    tags: Sequence[str] = (),
    license: str | None = None,
    datasets: Sequence[str] = (),
) -> str:
    """The text of a card: metadata, use, spec, counts and evaluation of an adapter."""
    base = _hub_base(adapter)
    data = ModelCardData(
        base_model=base,
        library_name=LIBRARY,
        tags=[LIBRARY, *tags],
        license=license,
        datasets=list(datasets) or None,
        metrics=list(evaluation) or None,
    )
    totals = adapter.plan.totals
    names = ("trained", "stored", "changed", "served")
    counts: list[tuple[str, int]] = [(name, getattr(totals, name)) for name in names]
    rows = [f"| {name} | {count:,} | {count / totals.base:.3%} |" for name, count in counts]
    stand = f"[{base}](https://huggingface.co/{base})" if base else "a base that is not on the hub"
    argument = "" if base else ", base=BASE"
    return f"""---
{data.to_yaml()}
---

# {repo_id.rpartition("/")[2]}

An adapter for {stand}, made by peftc. It has {len(adapter.tensors):,} tensors, and no weights of the base.

```python
import peftc

model = peftc.from_pretrained("{repo_id}"{argument})
```

## Spec

```text
{adapter.spec.strip()}
```

## Parameters

| | parameters | of the base |
|---|---:|---:|
{chr(10).join(rows)}

The base has {totals.base:,} parameters, and its fingerprint is `{adapter.base.fingerprint[:16]}`.
{_evaluation(evaluation)}"""


def _hub_base(adapter: Adapter) -> str | None:
    origin = adapter.base.origin
    return None if origin is None or origin.name is None or os.path.isabs(origin.name) else origin.name


def _evaluation(evaluation: Evaluation) -> str:
    if not evaluation:
        return ""
    numbers = {name: f"{v:.4g}" if isinstance(v, float) else f"{v}" for name, v in evaluation.items()}
    rows = [f"| {name} | {number} |" for name, number in numbers.items()]
    return "\n## Evaluation\n\n| metric | value |\n|---|---:|\n" + "\n".join(rows) + "\n"
