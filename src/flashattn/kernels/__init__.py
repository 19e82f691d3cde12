"""Device code. Imports triton, math and its own rooms only: nothing here knows PyTorch."""
