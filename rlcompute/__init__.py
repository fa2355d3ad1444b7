"""Reinforcement-learned adaptive compute for mixture-of-experts multimodal embedders."""

__version__ = "0.1.0"
