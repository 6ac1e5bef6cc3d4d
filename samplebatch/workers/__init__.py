"""Rollout workers: processes that collect steps with a policy and send the steps in fragments."""
