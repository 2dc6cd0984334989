"""`python -m benchmarks.families.worker`: answers the coverage benchmark's jobs; started by
`benchmarks.families.pool`.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import transformers

from benchmarks.families.build import build
from benchmarks.families.failures import reason_of
from benchmarks.families.forward import finite, run
from benchmarks.families.pool import Answer, Job, serve


def answer(job: Job) -> Answer:
    """The result for one model type: whether it was built, whether it ran, and the checks."""
    start = time.perf_counter()
    result: dict[str, Any] = {"built": False, "ran": False}
    try:
        model, inputs = build(job["mapping"], job["type"])
        result |= {"built": True, "parameters": sum(p.numel() for p in model.parameters())}
        result |= {"inputs": sorted(inputs)}
        if not finite(run(model, inputs)):
            raise ValueError("the output is not finite")
        result["ran"] = True
    except Exception as error:  # any exception of a model's code is its verdict
        result["why_not"] = reason_of(error)
    if result["ran"] and not job.get("build_only"):
        from benchmarks.families.checks import checked

        result |= checked(model, inputs)
    return result | {"seconds": round(time.perf_counter() - start, 2)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    serve(answer)
