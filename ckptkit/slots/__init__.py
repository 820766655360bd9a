"""The fast tiers: preallocated files that are reused from save to save, and their manifests."""
