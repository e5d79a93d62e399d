"""What stands between an inference framework and the core. Each module imports its framework; nothing else does."""
