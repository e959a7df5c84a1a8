"""Masks: which key each query may see, built, counted, recognised and compared."""
