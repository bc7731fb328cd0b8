"""Training of drafters. Never imported by inference."""
