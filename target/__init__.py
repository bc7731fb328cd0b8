"""GPT-OSS in JAX: imports peagle.ops and nothing else of ours."""
