"""The libraries whose GPU arrays cydist takes, and CUDA's driver."""
