"""Several devices and several processes: meshes, cut weights, rank 0 and the others."""
