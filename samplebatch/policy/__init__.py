"""Policies: calling them for actions, seeding them, and loading new weights."""
