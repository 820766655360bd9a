"""`python -m ckptkit.testing.simulation`."""

from ckptkit.testing.simulation.run import main

main()
