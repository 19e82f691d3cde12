"""The host side of the kernels: allocate, describe, launch."""
