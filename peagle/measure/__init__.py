"""Measure: figures of requests, benchmarks, profiles and sweeps, and where figures come from."""
