"""hardware: the machine below: NCCL's topology, cores near a GPU, async tensor parallelism."""
