#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "runtime/comm/group.h"

namespace tessera {

/// Tessera's only interface to MPI. The plug-in libtessera_mpi.so (mpi_backend.cc) has one object of this type, under
/// the name kSymbol. The library, the programs and the wheel are not linked with MPI. The file mpi_transport.cc loads
/// the plug-in when a job asks for the transport `mpi`.
struct MpiPlugin {
  static constexpr int kVersion = 1;  ///< grows with each change of this struct, of Group or of the effects of `join`
  static constexpr const char* kFile = "libtessera_mpi.so";
  static constexpr const char* kSymbol = "tessera_mpi_plugin";

  int version;        ///< kVersion of the plug-in's sources; it is the first member in all versions
  const char* torch;  ///< the LibTorch that the plug-in was built with, such as "2.15.0"

  /// Makes this rank's side of a group. The first call starts MPI in this process. A call is collective over the group,
  /// and waits without a limit for ranks that do not make it. Any thread may call it. It throws std::invalid_argument
  /// if MPI has no threads (MPI_THREAD_MULTIPLE), counts the job's ranks differently or has ended. It throws
  /// std::runtime_error if MPI fails.
  c10::intrusive_ptr<c10d::Backend> (*join)(const Group& group);
};

}  // namespace tessera
