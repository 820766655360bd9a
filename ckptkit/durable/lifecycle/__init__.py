"""Which steps a durable root holds, which are read, pinned or abandoned, and how one is deleted."""
