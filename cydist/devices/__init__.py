"""The libraries whose arrays are taken, and CUDA's driver. Imports leaves alone."""
