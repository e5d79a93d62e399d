"""Benchmarks: each prints figures as ratios measured side by side in one run. `scripts/bench NAME`."""
