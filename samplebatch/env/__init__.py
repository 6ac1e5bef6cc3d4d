"""Adapters that give environments of Gymnasium, PettingZoo and RLlib one interface."""
