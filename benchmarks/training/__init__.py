"""Training tasks and who learns them: our algorithms, Tianshou's and Stable-Baselines3's, over the same data."""
