"""Adapters that provide a common interface to Gymnasium, PettingZoo and RLlib environments."""
