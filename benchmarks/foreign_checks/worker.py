"""`python -m benchmarks.foreign_checks.worker`: answers the jobs of `benchmarks.foreign`."""

from __future__ import annotations

import time
import warnings

import torch
import torch._dynamo  # imported once, before the processes are forked

from benchmarks.families.pool import Answer, Job, serve
from benchmarks.foreign_checks.checks import checked
from benchmarks.foreign_models import cases


def answer(job: Job) -> Answer:
    """The verdicts on one case."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start = time.perf_counter()
    case = next(case for case in cases(job["module"]) if case.name == job["name"])
    result = checked(case, job["edits"], dynamo=job["dynamo"])
    return result | {"seconds": round(time.perf_counter() - start, 1)}


if __name__ == "__main__":
    serve(answer, fork=True)
