"""How the durable tier is written and read: profiles, what they cost, and how to find one."""

from ckptkit.tuning.profile import DurableProfile

__all__ = ["DurableProfile"]
