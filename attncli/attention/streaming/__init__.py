"""Statistics of rows, heads and keys in memory that grows with n alone."""
