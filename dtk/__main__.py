"""`python -m dtk` is `dtk`."""

from dtk.cli.main import main

main(prog_name="dtk")
