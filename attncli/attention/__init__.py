"""The mathematics: tensors in, dataclasses out. Knows neither files nor terminals."""
