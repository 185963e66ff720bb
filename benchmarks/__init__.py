"""What is fast enough, as ratios inside one run: absolute times on a shared machine mean nothing."""
