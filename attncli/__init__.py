"""Attention analysis: every stage of scaled dot-product attention, for people and programs."""

__version__ = "0.1.0"
