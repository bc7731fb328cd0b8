"""Pages of keys and values: the pool, the tables, the bytes. No JAX programs."""
