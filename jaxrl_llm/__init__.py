"""Reinforcement learning for language models in JAX: pure, jitted, sharded rollouts and updates."""

__version__ = "0.1.0"
