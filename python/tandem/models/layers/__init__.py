"""The parts models are built from, each as plain torch (`reference`) and on the compiled kernels (`cpu`)."""
