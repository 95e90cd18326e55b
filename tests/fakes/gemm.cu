// A launch of the GEMM on the host.
#include "wgmma.cu"

#include "launch.cuh"

extern "C" void launch(int blocks, const void* arguments) { launch(gemm, blocks, arguments); }
