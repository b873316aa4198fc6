#pragma once

namespace tessera {

// clang-format off
/// The transports of "comm", with a row for each: ROW(enumerator, word, text, traits). A new row must be the last one.
/// The library uses these rows to make TransportChoice, TransportKind (runtime/comm/collectives.h), the words that a
/// strategy file may use, and their texts in docs/strategy.md. `traits` are those of runtime/config/transport_rows.h,
/// joined by |: where the ranks are, and what their groups can do. The function that joins the ranks is a row of
/// runtime/comm/job/process_mesh.cc.
#define TESSERA_TRANSPORTS(ROW)                                                                                        \
  ROW(kHost, "host", "shared memory: all ranks on one host", kOneHost | kSharedMemory)                                 \
  ROW(kGloo, "gloo", "TCP", kBackground)                                                                               \
  ROW(kNccl, "nccl", "NVIDIA GPUs, one a rank: the module is trained there", kOnGpu)                                   \
  ROW(kCudaHost, "cuda_host",                                                                                          \
      "NVIDIA GPUs of one host, which ranks may share: to run on one card what is made for many", kOneHost | kOnGpu)   \
  ROW(kMpi, "mpi", "the machine's MPI, where mpirun or srun start the ranks; needs a plug-in", kBackground)
// clang-format on

#define TESSERA_ENUMERATOR(enumerator, ...) enumerator,
/// The transport of collectives; with kAuto Tessera chooses it. docs/strategy.md says what each transport needs.
enum class TransportChoice { kAuto, TESSERA_TRANSPORTS(TESSERA_ENUMERATOR) };
#undef TESSERA_ENUMERATOR

}  // namespace tessera
