"""Rollout workers, which collect steps with a policy in separate processes and send the steps in fragments."""
