"""Kernels for Hopper (compute capability 9.0) in Gluon: warps with roles, TMA copies, wgmma, register budgets."""
