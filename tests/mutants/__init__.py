"""A seeded mutation run: small textual faults are put into peftc, and the tests must see them.

    make mutants    # hours on two cores: one run of the tests with probes, then each fault against
    the tests that reach it

`faults.py` finds what can be changed and chooses, `probes.py` marks the places in a copy of the
sources, `recorder.py` is the pytest plugin that notes which test reaches which of them, `run.py`
runs and reports. Results are in `benchmarks/results/mutants.{json,md}`; `reasons.json` says why a
fault that survives is no fault, or not worth a test.
"""
