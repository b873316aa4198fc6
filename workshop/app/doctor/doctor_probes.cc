#include "workshop/app/doctor/doctor_probes.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <linux/io_uring.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include "optim/arithmetic/instruction_set.h"
#include "runtime/base/bytes.h"
#include "runtime/base/status.h"
#include "runtime/comm/shared/memory_segment.h"
#include "workshop/bench/disk_speed.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string error_text() { return std::strerror(errno); }

/// Returns the flags of the first processor, surrounded by blanks.
std::string cpu_flags() {
  std::istringstream text(read_text("/proc/cpuinfo"));
  for (std::string line; std::getline(text, line);)
    if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) return line.substr(line.find(':') + 1) + " ";
  return " ";
}

/// Runs `body` in a child process and returns its exit code; -1 if it did not exit.
template <class Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

}  // namespace

Finding probe_cores() {
  const unsigned cores = std::thread::hardware_concurrency();
  Finding finding{"cores", Health::kOk, std::to_string(cores) + " usable by this process", ""};
  if (cores < 2) {
    finding.health = Health::kWarn;
    finding.fix = "two ranks on one core take turns; allow more (taskset, the container's --cpus)";
  }
  return finding;
}

Finding probe_instruction_set() {
  const InstructionSet best = best_instruction_set();
  const std::string flags = cpu_flags();
  const bool amx = flags.find(" amx_bf16 ") != std::string::npos;
  const bool avx = flags.find(" avx512_bf16 ") != std::string::npos;
  Finding finding{"instruction set", Health::kOk,
                  std::string(name_of(best)) + (amx   ? ", bf16 matrix products by AMX"
                                                : avx ? ", bf16 products by AVX-512"
                                                      : ""),
                  ""};
  if (best == InstructionSet::kPortable) {
    finding.health = Health::kWarn;
    finding.fix = "the optimizer's loops run at SSE2's width; a processor with AVX2 is several times as fast";
  } else if (!amx && !avx) {
    finding.health = Health::kWarn;
    finding.found += ", no bf16 products";
    finding.fix = "bf16 parameters are emulated here: \"mixed_precision\": {\"param\": \"fp32\"} computes faster";
  }
  return finding;
}

Finding probe_transparent_huge_pages() {
  const std::string text = read_text("/sys/kernel/mm/transparent_hugepage/enabled");
  const auto open = text.find('['), close = text.find(']');
  const std::string mode = close == std::string::npos ? "unknown" : text.substr(open + 1, close - open - 1);
  Finding finding{"transparent huge pages", Health::kOk, mode, ""};
  if (mode != "always" && mode != "madvise") {
    finding.health = Health::kWarn;
    finding.fix = "large buffers cost more page faults; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
  }
  return finding;
}

Finding probe_locked_memory() {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
  Finding finding{"locked memory", Health::kOk,
                  unlimited ? "unlimited" : format_bytes(static_cast<std::int64_t>(limit.rlim_cur)), ""};
  if (!unlimited && limit.rlim_cur < (64u << 20)) {
    finding.health = Health::kWarn;
    finding.fix =
        "too little for registered I/O buffers and GPUs; ulimit -l unlimited, \"memlock\" in limits.conf, or "
        "docker --ulimit memlock=-1";
  }
  return finding;
}

Finding probe_shared_memory_size() {
  struct statvfs info {};
  Finding finding{"/dev/shm", Health::kOk, "", ""};
  if (statvfs("/dev/shm", &info) != 0) {
    finding.health = Health::kWarn;
    finding.found = error_text();
    finding.fix = "Tessera does not need it (it uses memfd), but NCCL does: mount a tmpfs there";
    return finding;
  }
  const auto bytes = static_cast<std::int64_t>(info.f_bavail) * static_cast<std::int64_t>(info.f_frsize);
  finding.found = format_bytes(bytes) + " free";
  if (bytes < (std::int64_t{1} << 30)) {
    finding.health = Health::kWarn;
    finding.fix = "Tessera does not need it (it uses memfd), but NCCL does: docker --shm-size=8g";
  }
  return finding;
}

Finding probe_shared_segment() {
  constexpr std::size_t kBytes = 4096;
  Finding finding{"shared memory between ranks", Health::kMissing, "",
                  "ranks of one host need memfd_create and /proc/<pid>/fd of one user and PID namespace; "
                  "else \"comm\": {\"transport\": \"gloo\"}"};
  auto segment = MemorySegment::create("tessera.doctor", kBytes, true);
  if (!segment.ok()) {
    finding.found = message_of(segment.status());
    return finding;
  }
  const pid_t owner = getpid();
  const int answer = in_child([&] {
    auto seen = MemorySegment::open(owner, segment->fd(), kBytes, true);
    if (seen.ok()) seen->data()[0] = std::byte{42};
    return seen.ok() ? 0 : 1;
  });
  if (answer != 0 || segment->data()[0] != std::byte{42}) {
    finding.found = "another process cannot open it";
    return finding;
  }
  return {"shared memory between ranks", Health::kOk, "memfd, opened by a second process", ""};
}

Finding probe_pidfd() {
  const long fd = syscall(SYS_pidfd_open, getpid(), 0);
  if (fd >= 0) {
    close(static_cast<int>(fd));
    return {"pidfd", Health::kOk, "pidfd_open works", ""};
  }
  return {"pidfd", Health::kWarn, error_text(),
          "a dead rank is noticed by its number only; Linux 5.3 or later, and a seccomp profile that allows "
          "pidfd_open"};
}

Finding probe_loopback() {
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
            client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  const bool works = bind(server, raw, length) == 0 && listen(server, 1) == 0 &&
                     getsockname(server, raw, &length) == 0 && connect(client, raw, length) == 0;
  const std::string why = works ? "" : error_text();
  close(server);
  close(client);
  if (works) return {"loopback", Health::kOk, "127.0.0.1 connects", ""};
  return {"loopback", Health::kMissing, why, "ranks meet over TCP; bring the interface up: ip link set lo up"};
}

Finding probe_io_uring() {
  io_uring_params params{};
  const long fd = syscall(SYS_io_uring_setup, 2, &params);
  if (fd >= 0) {
    close(static_cast<int>(fd));
    return {"io_uring", Health::kOk, "a ring can be made", ""};
  }
  return {"io_uring", Health::kWarn, error_text(),
          "offload moves its records on threads instead; sysctl kernel.io_uring_disabled=0, and a container profile "
          "that allows it"};
}

Finding probe_cuda_toolkit() {
  std::vector<std::string> places;
  if (const char* home = std::getenv("CUDA_HOME")) places.push_back(std::string(home) + "/bin");
  std::istringstream path(std::getenv("PATH") ? std::getenv("PATH") : "");
  for (std::string folder; std::getline(path, folder, ':');) places.push_back(folder);
  places.push_back("/usr/local/cuda/bin");
  for (const std::string& folder : places) {
    if (access((folder + "/nvcc").c_str(), X_OK) == 0) return {"CUDA toolkit", Health::kOk, folder + "/nvcc", ""};
  }
  return {"CUDA toolkit", Health::kWarn, "no nvcc in PATH, CUDA_HOME or /usr/local/cuda",
          "only builds for GPUs need it; scripts/setup takes it from PyPI into .venv"};
}

Finding probe_cuda_driver() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!driver)
    return {"CUDA driver", Health::kWarn, "no libcuda.so.1",
            "training runs on the CPU; GPUs need NVIDIA's driver (containers: --gpus all)"};
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  int devices = 0;
  const bool works = init && count && init(0) == 0 && count(&devices) == 0;
  dlclose(driver);
  if (works && devices > 0) return {"CUDA driver", Health::kOk, std::to_string(devices) + " devices", ""};
  return {"CUDA driver", Health::kWarn, "loaded, but no device answers", "nvidia-smi says why"};
}

Finding probe_disk(const std::string& directory) {
  const std::string name = "disk of " + directory;
  const absl::StatusOr<DiskSpeed> speed = measure_disk({.directory = directory});
  if (!speed.ok()) return {name, Health::kWarn, message_of(speed.status()), "name another directory in offload.paths"};
  const auto rate = [](double bytes_per_s) { return number_text(bytes_per_s * 1e-9, "%.2f GB/s"); };
  const std::string found = "write " + rate(speed->write_bytes_per_s()) + ", read " + rate(speed->read_bytes_per_s()) +
                            ", read and write back " + rate(speed->mixed_bytes_per_s()) + "; " + speed->file_mode +
                            ", " + speed->engine;
  if (speed->file_mode == "O_DIRECT") return {name, Health::kOk, found, ""};
  return {name, Health::kWarn, found,
          "offload goes through the page cache here, which needs memory of its own; take a file system with O_DIRECT, "
          "such as ext4 or xfs on a local disk"};
}

}  // namespace tessera::app
