// Compiles the source of the optimizer's CUDA kernels to run on the host thread by thread. The source is compiled once
// for all tests that call the kernels through their headers.
#include "tests/support/stand_ins/cuda_on_host.h"
// The source of the kernels must be included after this header.
#include "optim/cuda/device_adafactor.cu"
#include "optim/cuda/device_codec.cu"
#include "optim/cuda/device_layers.cu"
#include "optim/cuda/device_norm.cu"
#include "optim/cuda/device_outer.cu"
#include "optim/cuda/device_signs.cu"
#include "optim/cuda/device_step.cu"
