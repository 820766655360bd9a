"""Agreement between the processes of a job, through JAX's coordination service, without device collectives."""
