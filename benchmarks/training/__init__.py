"""Training tasks, and the runs of our, Tianshou's and Stable-Baselines3's algorithms on these tasks."""
