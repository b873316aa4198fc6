// The source of the optimizer's CUDA kernels, run on the host thread by thread: once for all tests that call it by its headers.
#include "tests/support/stand_ins/cuda_on_host.h"
// Behind it: the kernels' source.
#include "optim/cuda/device_adafactor.cu"
#include "optim/cuda/device_layers.cu"
#include "optim/cuda/device_norm.cu"
#include "optim/cuda/device_step.cu"
