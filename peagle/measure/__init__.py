"""Counters to figures: metrics, profile, bench, sweep, log-probabilities, and where a number comes from."""
