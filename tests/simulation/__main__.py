"""`python -m tests.simulation`."""

from tests.simulation.run import main

main()
