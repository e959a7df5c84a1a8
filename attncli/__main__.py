"""`python -m attncli` is the same program as `attncli`."""

from attncli.cli.app import main

main()
