"""P-EAGLE: the drafter, in JAX. Imports peagle.ops and nothing else of ours."""
