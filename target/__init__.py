"""GPT-OSS in JAX. Imports no other package of the project but peagle.ops."""

import peagle  # noqa: F401  sets the XLA flag of peagle.ops.jax_workaround, even if only this package is imported
