"""GPU memory over NCCL: the backend "nccl", on cupy's binding or on nccl4py."""
