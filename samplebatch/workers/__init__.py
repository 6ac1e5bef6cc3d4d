"""Rollout workers: processes that collect with a policy and send fragments of the steps."""
