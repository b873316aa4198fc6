#include "tests/offload/scratch.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>

#include "runtime/base/log.h"

namespace tessera {

ScratchFolder::ScratchFolder() {
  path_ = (std::filesystem::current_path() / "scratch-XXXXXX").string();
  if (::mkdtemp(path_.data()) == nullptr) std::abort();
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> ScratchFolder::names() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_))
    names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

FewDescriptors::FewDescriptors(int more) {
  if (::getrlimit(RLIMIT_NOFILE, &before_) != 0) std::abort();
  int limit = 0;
  while (::fcntl(limit, F_GETFD) >= 0 || more-- > 0) ++limit;
  const rlimit lowered{static_cast<rlim_t>(limit), before_.rlim_max};
  if (::setrlimit(RLIMIT_NOFILE, &lowered) != 0) std::abort();
}

ChildEnd in_child(const std::function<int()>& body) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
  std::fflush(stdout);  // otherwise the child would also print the parent's pending output
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], 2);
    ::close(ends[0]);
    set_log_level(LogLevel::kInfo);  // tests look at warnings, so TESSERA_LOG_LEVEL does not count
    ::_exit(body());
  }
  ::close(ends[1]);
  ChildEnd end;
  char buffer[4096];
  for (ssize_t got; (got = ::read(ends[0], buffer, sizeof(buffer))) > 0;)
    end.text.append(buffer, static_cast<std::size_t>(got));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  return end;
}

bool enter_own_mounts() {
  return ::unshare(CLONE_NEWNS) == 0 && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

bool mount_tmpfs(const std::string& at, const std::string& size) {
  return ::mount("tessera", at.c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0;
}

bool forbid_io_uring(int error) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (static_cast<unsigned>(error) & SECCOMP_RET_DATA)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = std::size(filter), .filter = filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

bool lower_locked_memory(std::uint64_t bytes) {
  const rlimit limit{bytes, bytes};
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || ::syscall(SYS_capget, &header, data) != 0) return false;
  data[0].effective &= ~(1u << CAP_IPC_LOCK);
  return ::syscall(SYS_capset, &header, data) == 0;
}

bool become_nobody() { return ::setgid(65534) == 0 && ::setuid(65534) == 0; }

void fill_pattern(std::span<std::byte> memory, std::uint64_t seed) {
  std::uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  for (std::size_t at = 0; at < memory.size(); at += sizeof(state)) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const std::uint64_t value = state ^ (state >> 29);
    std::memcpy(memory.data() + at, &value, std::min(sizeof(value), memory.size() - at));
  }
}

std::uint64_t hash_of(std::span<const std::byte> memory) { return XXH3_64bits(memory.data(), memory.size()); }

std::vector<IoVariant> io_variants() {
  std::vector<IoVariant> variants;
  for (const bool direct : {true, false}) {
    const std::string end = direct ? "Direct" : "Buffered";
    variants.push_back({"Uring" + end, {.engine = IoEngine::kUring}, direct});
    variants.push_back({"UringUnregistered" + end, {.engine = IoEngine::kUring, .register_memory = false}, direct});
    variants.push_back({"UringTinyQueue" + end, {.engine = IoEngine::kUring, .queue_entries = 2}, direct});
    variants.push_back({"Threads" + end, {.engine = IoEngine::kThreads, .threads = 3}, direct});
  }
  return variants;
}

}  // namespace tessera
