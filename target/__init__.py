"""GPT-OSS in JAX. Of ours it imports peagle.base and peagle.ops alone."""

import peagle  # noqa: F401  sets the XLA flag of peagle.base.jax_workaround, even if only this package is imported
