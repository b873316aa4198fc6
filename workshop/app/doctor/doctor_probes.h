#pragma once

#include <functional>
#include <string>

namespace tessera::app {

/// The state of a thing that was probed.
enum class Health {
  kOk,
  kWarn,     ///< it works, but slower or not everywhere
  kMissing,  ///< Tessera's own CPU training does not work without it
};

/// The result of one probe, and a remedy if the health is not kOk.
struct Finding {
  std::string name;
  Health health = Health::kOk;
  std::string found;
  std::string fix;
};

/// Each probe inspects the machine and changes nothing. All except probe_disk are fast.
Finding probe_cores();
Finding probe_instruction_set();
Finding probe_transparent_huge_pages();
Finding probe_locked_memory();
Finding probe_shared_memory_size();
Finding probe_shared_segment();  ///< memfd, opened by another process: the `host` transport is built on it
Finding probe_pidfd();
Finding probe_loopback();
Finding probe_io_uring();
Finding probe_cuda_toolkit();
Finding probe_cuda_driver();
/// The paths and names for which probe_rdma looks.
struct RdmaPlaces {
  std::string devices;                                    ///< such as /sys/class/infiniband: one folder for each device
  std::function<bool(const std::string& library)> loads;  ///< whether the loader finds a library
  std::string net_plugin;                                 ///< NCCL_NET_PLUGIN; empty: not set

  static RdmaPlaces of_this_machine();
};
/// Finds devices for RDMA (InfiniBand, RoCE, EFA), and whether NCCL or an MPI of this machine can use them. Needs no
/// GPU: it looks for devices and libraries, and opens no device.
Finding probe_rdma(const RdmaPlaces& places = RdmaPlaces::of_this_machine());
/// Writes and reads a private scratch file of 1 GiB in `directory`, as offload does.
Finding probe_disk(const std::string& directory);

}  // namespace tessera::app
