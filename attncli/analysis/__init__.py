"""From what a caller gives to results: one assembly for the command line and for Python."""
