"""What tests of several rooms share: toy models and pairs, servers, counters."""
