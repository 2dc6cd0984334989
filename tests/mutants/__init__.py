"""A seeded mutation run: small textual faults are put into peftc, and the tests must see them.

    make mutants    # hours on two cores: one run of the tests with coverage, then each fault against the tests that reach its line

`faults.py` finds what can be changed, `recorder.py` is the pytest plugin that notes which test reaches which line, `run.py` chooses, runs and reports.
Results are in `benchmarks/results/mutants.{json,md}`; `reasons.json` says why a fault that survives is no fault, or not worth a test.
"""
