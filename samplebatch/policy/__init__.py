"""Policies: asked for actions, seeded, given new weights."""
