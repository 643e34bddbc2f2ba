"""Measurements of jaxpaged; run them from the repository root: `python -m benchmarks.NAME`."""
