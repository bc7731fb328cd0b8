"""Measure: figures of requests, benchmarks and sweeps, and where figures come from."""
