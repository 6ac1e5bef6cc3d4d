"""Policies: adapters for actions, seeds and weights."""
