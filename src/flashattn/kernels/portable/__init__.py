"""Plain Triton kernels: any GPU that Triton runs on, and its CPU interpreter."""
