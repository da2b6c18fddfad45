"""CuPy, to ranks on a machine without CUDA's driver: to load it, for no GPU, takes each 0.2 s."""

raise ImportError("there is no driver of CUDA")
