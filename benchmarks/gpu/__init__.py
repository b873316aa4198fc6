"""What benchmarks/run_gpu measures, in what order, and what becomes of it. Standard library only, but for peers/."""
