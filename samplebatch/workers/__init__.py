"""Processes that collect with a policy and send fragments of the steps."""
