"""The variance of q·k: drawn, exact in given tensors, and what it says about the scale."""
