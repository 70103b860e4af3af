"""What all operations share on the host: when kernels can run, compiling and launching them."""
