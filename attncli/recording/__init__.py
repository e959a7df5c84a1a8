"""Q, K and V of a running model, with what shaped attention in each layer."""
