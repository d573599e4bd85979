"""Benchmarks of the state copy: `python -m pallas_kernels.bench --help`."""
