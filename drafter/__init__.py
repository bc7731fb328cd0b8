"""P-EAGLE: the drafter, in JAX. Imports peagle.ops and nothing else of ours."""

import peagle  # noqa: F401  whoever imports only this package gets a JAX that computes right, too (peagle.ops.jax_cure)
