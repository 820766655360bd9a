"""`python -m bench.protocol`."""

from bench.protocol.run import main

main()
