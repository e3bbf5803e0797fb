"""Speed and memory of knapgrad against two baselines: ``python -m benchmarks --help``."""
