// This file is the plug-in libtessera_mpi.so, a c10d::Backend that sends messages and makes broadcasts and barriers by
// MPI. It is built if MPI is found (cmake/TesseraMpi.cmake). No other source includes mpi.h.
//
// MpiBackend begins each call of MPI and gives it to Pump. Pump's thread tests all requests, and ends a Call when MPI
// has ended its request.

#include <mpi.h>
#include <stdlib.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/mpi/mpi_plugin.h"

namespace tessera {
namespace {

std::string text_of(int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {text, static_cast<std::size_t>(length)};
}

/// Throws an exception with MPI's text for an error.
void check(int code, const char* call) {
  if (code != MPI_SUCCESS) throw std::runtime_error(std::string(call) + ": " + text_of(code));
}

/// A number of bytes in the form that MPI takes. MPI's counts are of type int, so more than a GiB is sent as one
/// element of an MPI type with that many bytes.
struct Bytes {
  explicit Bytes(std::size_t bytes) {
    constexpr std::size_t kBlock = std::size_t{1} << 30;
    if (bytes <= kBlock) {
      count = static_cast<int>(bytes);
      return;
    }
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block), "MPI_Type_contiguous");
    int lengths[] = {static_cast<int>(bytes / kBlock), static_cast<int>(bytes % kBlock)};
    MPI_Aint places[] = {0, static_cast<MPI_Aint>(bytes / kBlock * kBlock)};
    MPI_Datatype types[] = {block, MPI_BYTE};
    check(MPI_Type_create_struct(2, lengths, places, types, &type), "MPI_Type_create_struct");
    check(MPI_Type_commit(&type), "MPI_Type_commit");
    check(MPI_Type_free(&block), "MPI_Type_free");
  }
  ~Bytes() {
    if (type != MPI_BYTE) MPI_Type_free(&type);  // MPI keeps the type for the calls under way
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  int count = 1;
  MPI_Datatype type = MPI_BYTE;
};

/// A message or a collective under way. Pump ends it.
class Call final : public c10d::Work {
 public:
  /// `limit` is the time limit of a wait for which the caller gives no limit.
  Call(bool is_receive, std::chrono::milliseconds limit) : is_receive_(is_receive), limit_(limit) {}

  bool is_receive() const { return is_receive_; }
  void end(const std::string& error) {
    finish(error.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(error)));
  }

  bool wait(std::chrono::milliseconds limit) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto longest = limit == kNoTimeout ? limit_ : limit;
    if (!cv_.wait_for(lock, longest, [this] { return completed_; }))
      throw std::runtime_error("not over after " + std::to_string(longest.count()) + " ms");
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }
  void abort() override;

 private:
  const bool is_receive_;
  const std::chrono::milliseconds limit_;
};
using CallPtr = c10::intrusive_ptr<Call>;

/// Drives all calls that this process has under way, since MPI moves bytes only while a thread is in one of MPI's
/// functions. A thread tests whether calls have ended. It tests without pauses while calls end, and otherwise about ten
/// thousand times a second.
class Pump {
 public:
  /// Returns the process's only pump, which is never destroyed.
  static Pump& of_process() {
    static Pump& pump = *new Pump;
    return pump;
  }

  /// Ends `call` when MPI has ended `request`.
  void add(MPI_Request request, CallPtr call) {
    {
      const MutexLock lock(mutex_);
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
      begun_.push_back({request, std::move(call)});
    }
    changed_.notify_all();
  }

  /// Ends `call` with an error. MPI can cancel only a message that has not begun to arrive. Every other call continues
  /// as long as both processes live.
  void abandon(Call& call) {
    constexpr auto kPatience = std::chrono::seconds(2);
    if (call.isCompleted()) return;
    const MutexLock lock(mutex_);
    abandoned_.push_back(&call);
    const std::uint64_t own = ++asked_;
    changed_.notify_all();
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (answered_ < own && !is_stopped_) {
      if (!changed_.wait_until(mutex_, until)) break;
    }
    std::erase(abandoned_, &call);  // the thread may still be in a call of MPI
  }

  /// Ends the thread. Returns whether no call was under way any more.
  bool stop() {
    {
      const MutexLock lock(mutex_);
      if (!thread_.joinable()) return true;
      is_stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
    const MutexLock lock(mutex_);
    return requests_.empty() && begun_.empty();
  }

 private:
  struct Begun {
    MPI_Request request;
    CallPtr call;
  };

  void run() {
    constexpr int kTurnsInVain = 100;
    constexpr std::chrono::microseconds kPause(50);
    for (int in_vain = 0;;) {
      std::uint64_t asked = 0;
      {
        const MutexLock lock(mutex_);
        while (requests_.empty() && begun_.empty() && abandoned_.empty() && !is_stopped_) changed_.wait(mutex_);
        if (is_stopped_) return;
        if (!begun_.empty() || !abandoned_.empty()) in_vain = 0;
        for (Begun& begun : begun_) {
          requests_.push_back(begun.request);
          calls_.push_back(std::move(begun.call));
        }
        begun_.clear();
        for (const Call* const call : abandoned_) cancel(*call);
        abandoned_.clear();
        asked = asked_;
      }
      in_vain = test_all() ? 0 : std::min(in_vain + 1, kTurnsInVain);
      bool has_answered = false;
      {
        const MutexLock lock(mutex_);
        has_answered = std::exchange(answered_, asked) != asked;
      }
      if (has_answered) changed_.notify_all();
      if (in_vain == 0) continue;
      in_vain < kTurnsInVain ? std::this_thread::yield() : std::this_thread::sleep_for(kPause);
    }
  }

  void cancel(const Call& call) {
    const auto found = std::ranges::find_if(calls_, [&](const CallPtr& each) { return each.get() == &call; });
    if (found == calls_.end()) return;  // the call was over already
    if (call.is_receive()) MPI_Cancel(&requests_[static_cast<std::size_t>(found - calls_.begin())]);
    const CallPtr abandoned = std::move(*found);
    abandoned->end("the group has failed");
  }

  /// Marks as done the calls whose MPI requests have completed. Returns whether there was such a call.
  bool test_all() {
    if (requests_.empty()) return false;
    const int count = static_cast<int>(requests_.size());
    done_.resize(requests_.size());
    statuses_.resize(requests_.size());
    int ended = 0;
    const int code = MPI_Testsome(count, requests_.data(), &ended, done_.data(), statuses_.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
      for (const CallPtr& call : calls_) {
        if (call) call->end("MPI_Testsome: " + text_of(code));
      }
      requests_.clear();
      calls_.clear();
      return true;
    }
    if (ended == MPI_UNDEFINED || ended == 0) return false;
    std::vector<bool> is_over(requests_.size());
    for (int i = 0; i < ended; ++i) {
      const auto at = static_cast<std::size_t>(done_[static_cast<std::size_t>(i)]);
      const int error = code == MPI_SUCCESS ? MPI_SUCCESS : statuses_[static_cast<std::size_t>(i)].MPI_ERROR;
      is_over[at] = true;
      if (calls_[at]) calls_[at]->end(error == MPI_SUCCESS ? "" : "MPI: " + text_of(error));
    }
    std::size_t kept = 0;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (is_over[i]) continue;
      requests_[kept] = requests_[i];
      calls_[kept++] = std::move(calls_[i]);
    }
    requests_.resize(kept);
    calls_.resize(kept);
    return true;
  }

  Mutex mutex_;
  CondVar changed_;
  std::vector<Begun> begun_ ABSL_GUARDED_BY(mutex_);
  std::vector<const Call*> abandoned_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t asked_ ABSL_GUARDED_BY(mutex_) = 0;  ///< calls of `abandon`; the thread has handled `answered_` of them
  std::uint64_t answered_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
  // Only the thread uses these members. A call is null when it was abandoned.
  std::vector<MPI_Request> requests_;
  std::vector<CallPtr> calls_;
  std::vector<int> done_;
  std::vector<MPI_Status> statuses_;
};

void Call::abort() { Pump::of_process().abandon(*this); }

/// The time for which a rank that fails waits before its process ends. Ranks that fail for one reason, such as a
/// verdict of CallWatch, may learn of this reason up to two seconds apart.
constexpr std::chrono::milliseconds kForOthersToSpeak(2500);

/// Ends MPI if the program ends well. A rank that fails ends without MPI_Finalize, and its launcher then ends the other
/// ranks. A rank that fails therefore waits first, so that the other ranks can end with their own errors.
void finalize(int status, void* process) {
  int is_over = 0;
  MPI_Finalized(&is_over);
  const bool is_ours = *static_cast<const pid_t*>(process) == getpid();  // a forked child does not use MPI
  if (!is_ours || is_over) return;
  if (status != 0) std::this_thread::sleep_for(kForOthersToSpeak);
  if (status == 0 && Pump::of_process().stop()) MPI_Finalize();
}

/// Starts MPI in this process, unless the program has started it. Returns a mask of the bits that a message's tag may
/// have. Throws std::invalid_argument if this MPI cannot be used, also at a later try.
int start_mpi() {
  static pid_t process = getpid();
  int is_started = 0, level = MPI_THREAD_SINGLE;
  check(MPI_Initialized(&is_started), "MPI_Initialized");
  if (is_started) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    on_exit(&finalize, &process);
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  if (level < MPI_THREAD_MULTIPLE)
    throw std::invalid_argument("MPI was started without MPI_THREAD_MULTIPLE, or has no threads");
  int* largest = nullptr;
  int is_known = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &is_known), "MPI_Comm_get_attr");
  const unsigned most = is_known ? static_cast<unsigned>(*largest) : 32767u;  // MPI guarantees at least this
  return static_cast<int>(std::bit_floor(most + 1u) - 1u);
}

class MpiBackend final : public c10d::Backend {
 public:
  MpiBackend(const Group& group, MPI_Comm ranks, int tag_bits)
      : Backend(group.rank, group.size()),
        ranks_(ranks),
        tag_bits_(tag_bits),
        limit_(static_cast<std::int64_t>(group.timeout_s * 1000)) {}
  ~MpiBackend() override {
    int is_over = 0;
    MPI_Finalized(&is_over);
    if (!is_over) MPI_Comm_free(&ranks_);  // MPI keeps the communicator for the calls under way
  }

  const std::string getBackendName() const override { return "mpi"; }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    const Bytes bytes(tensors.at(0).nbytes());
    return begin("MPI_Isend", false, [&](MPI_Request* request) {
      return MPI_Isend(tensors[0].data_ptr(), bytes.count, bytes.type, to, tag & tag_bits_, ranks_, request);
    });
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    const Bytes bytes(tensors.at(0).nbytes());
    return begin("MPI_Irecv", true, [&](MPI_Request* request) {
      return MPI_Irecv(tensors[0].data_ptr(), bytes.count, bytes.type, from, tag & tag_bits_, ranks_, request);
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const Bytes bytes(tensors.at(0).nbytes());
    const int root = static_cast<int>(options.rootRank);
    return collective(begin("MPI_Ibcast", false, [&](MPI_Request* request) {
      return MPI_Ibcast(tensors[0].data_ptr(), bytes.count, bytes.type, root, ranks_, request);
    }));
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return collective(
        begin("MPI_Ibarrier", false, [&](MPI_Request* request) { return MPI_Ibarrier(ranks_, request); }));
  }

  /// Ends the wait for a collective; C10dCalls ends messages itself.
  void abort() override {
    CallPtr last;
    {
      const MutexLock lock(mutex_);
      last = collective_;
    }
    if (last) last->abort();
  }

 private:
  /// Starts a call by `start`. Small messages are mostly complete at once.
  template <typename Start>
  CallPtr begin(const char* name, bool is_receive, Start start) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(start(&request), name);
    auto call = c10::make_intrusive<Call>(is_receive, limit_);
    int is_over = 0;
    check(MPI_Test(&request, &is_over, MPI_STATUS_IGNORE), name);
    if (is_over) {
      call->end("");
    } else {
      Pump::of_process().add(request, call);
    }
    return call;
  }

  c10::intrusive_ptr<c10d::Work> collective(CallPtr call) {
    const MutexLock lock(mutex_);
    return collective_ = std::move(call);
  }

  MPI_Comm ranks_;
  const int tag_bits_;
  const std::chrono::milliseconds limit_;
  Mutex mutex_;
  CallPtr collective_ ABSL_GUARDED_BY(mutex_);  ///< the collective that was begun last
};

/// Returns a tag for the making of this group: a hash (FNV-1a) of its key. The tag is the same on all ranks. Other
/// groups have other tags in most cases.
int tag_of(const Group& group) {
  std::uint32_t hash = 2166136261u;
  for (const char letter : group.key()) hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619u;
  return static_cast<int>(hash >> 17);  // 15 bits, which every MPI takes
}

c10::intrusive_ptr<c10d::Backend> join(const Group& group) {
  int is_over = 0;
  check(MPI_Finalized(&is_over), "MPI_Finalized");
  if (is_over) throw std::invalid_argument("the program has ended MPI (MPI_Finalize)");
  static const int tag_bits = start_mpi();
  int rank = 0, size = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  if (size != group.world_size || rank != group.world_rank(group.rank))
    throw std::invalid_argument("this is rank " + std::to_string(rank) + "/" + std::to_string(size) + " to MPI");
  MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  MPI_Comm ranks = MPI_COMM_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
  check(MPI_Group_incl(all, group.size(), group.world_ranks.data(), &members), "MPI_Group_incl");
  check(MPI_Comm_create_group(MPI_COMM_WORLD, members, tag_of(group), &ranks), "MPI_Comm_create_group");
  check(MPI_Comm_set_errhandler(ranks, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Group_free(&members);
  MPI_Group_free(&all);
  return c10::make_intrusive<MpiBackend>(group, ranks, tag_bits);
}

}  // namespace

extern "C" {
extern const MpiPlugin tessera_mpi_plugin;
const MpiPlugin tessera_mpi_plugin = {MpiPlugin::kVersion, TORCH_VERSION, &join};
}

}  // namespace tessera
