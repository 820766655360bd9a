"""How data replicas read the durable tier once and send the bytes to each other by a collective."""
