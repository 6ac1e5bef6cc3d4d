"""Environments of Gymnasium and PettingZoo behind one interface: reset, step, spaces."""
