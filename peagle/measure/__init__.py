"""Counters to figures: metrics, profile, bench, sweep, log-probabilities, provenance."""
