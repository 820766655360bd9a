"""Pure values, without JAX: boxes, manifests, names on disk, tiers and policies."""
