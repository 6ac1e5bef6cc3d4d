"""Batch: named values in a tree, as Tianshou's users know it."""
