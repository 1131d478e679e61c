"""hardware: what this machine is made of: NCCL's topology, cores near a GPU, async tensor parallelism."""
