"""The door: tensors in and out of files, told apart by content and read without trust."""
