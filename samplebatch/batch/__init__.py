"""Batches: named columns of equal length."""
