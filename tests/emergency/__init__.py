"""Orbax's emergency manager over our tiers."""
