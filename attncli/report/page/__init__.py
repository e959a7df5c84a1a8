"""A page about heads that is one file: its template, its style, its scripts, and who writes it."""
