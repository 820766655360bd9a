"""The durable tier: plain Orbax step directories, written from host memory, with our sidecars in them."""
