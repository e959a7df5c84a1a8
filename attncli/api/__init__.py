"""The Python side of the commands: tensors and keywords in, dataclasses out."""
