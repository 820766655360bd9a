"""Host to host: each process serves the committed slots of its host to the other processes of its job."""
