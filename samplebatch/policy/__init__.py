"""Policies: adapters, random policies, action maps, recurrent states and weights."""
