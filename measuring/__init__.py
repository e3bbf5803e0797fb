"""What benchmarks and experiments share: clocks, and the origin of a result."""
