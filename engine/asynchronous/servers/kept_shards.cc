#include "engine/asynchronous/servers/kept_shards.h"

#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/files/hash.h"
#include "checkpoint/files/regular_file.h"
#include "offload/files/atomic_file.h"
#include "offload/files/file_calls.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr char kWho[] = "parameter server";
constexpr std::chrono::milliseconds kPatience{30'000};  // the server that had the folder before may still be writing

/// The first bytes of a file.
struct ImageHead {
  static constexpr std::uint64_t kMagic = 0x3164726168735354;  // "TSshard1"

  std::uint64_t magic = kMagic;
  std::uint64_t run = 0;   ///< hash of the run's definition
  std::uint64_t hash = 0;  ///< hash of the bytes behind the head
  std::int64_t bytes = 0;  ///< number of bytes behind the head
  std::uint64_t zeros[4] = {};
};
static_assert(sizeof(ImageHead) == KeptShards::kHeadBytes);

/// Removes the files that servers of this folder were writing when they were killed. Each such file may be as large as
/// a shard.
void remove_unfinished(const FilePlace& folder) {
  std::vector<std::string> names;
  file_calls::list_folder(folder, names);  // a file that is not listed takes space, and does no other harm
  for (const std::string& name : names)
    if (name.starts_with("shard-") && name.find(".tmp-") != std::string::npos) file_calls::unlink(folder / name);
}

absl::Status damaged(const std::string& path) {
  return make_error(ExitCode::kCorruptData,
                    std::string(kWho) + ": " + path +
                        " is damaged. [T0999] hint: end the run, remove this folder, and go on from a checkpoint");
}

}  // namespace

absl::StatusOr<std::unique_ptr<KeptShards>> KeptShards::open(const KeepOptions& options, int server,
                                                             const std::string& definition) {
  const FilePlace folder(options.folder + "/server-" + std::to_string(server));
  TESSERA_RETURN_IF_ERROR(make_folders(folder.path(), kWho));
  TESSERA_ASSIGN_OR_RETURN(FolderLock lock,
                           FolderLock::take(folder / "lock", "keeps shards in " + folder.path(), kWho, kPatience));
  remove_unfinished(folder);
  return std::unique_ptr<KeptShards>(
      new KeptShards(folder, std::move(lock), options.lose, checkpoint_hash(definition)));
}

absl::Status KeptShards::write(std::size_t shard, std::vector<std::byte>& image) const {
  const std::span<const std::byte> own = std::span<const std::byte>(image).subspan(kHeadBytes);
  ImageHead head;
  head.run = run_;
  head.hash = checkpoint_hash(own);
  head.bytes = static_cast<std::int64_t>(own.size());
  std::memcpy(image.data(), &head, sizeof head);
  return write_file_atomically(place_of(shard), image, kWho);
}

absl::StatusOr<std::vector<std::byte>> KeptShards::read(std::size_t shard) const {
  const FilePlace place = place_of(shard);
  const std::string& path = place.path();
  std::error_code none;
  if (!std::filesystem::exists(path, none)) return std::vector<std::byte>();
  TESSERA_ASSIGN_OR_RETURN(const RegularFile file, RegularFile::open(path, kWho, place.parts()));
  ImageHead head;
  if (file.bytes() < static_cast<std::int64_t>(sizeof head)) return damaged(path);
  TESSERA_RETURN_IF_ERROR(file.read(0, std::as_writable_bytes(std::span<ImageHead, 1>(&head, 1))));
  if (head.magic != ImageHead::kMagic) return damaged(path);
  if (head.run != run_) return std::vector<std::byte>();
  std::vector<std::byte> image(static_cast<std::size_t>(file.bytes()));
  TESSERA_RETURN_IF_ERROR(file.read(0, image));
  const std::span<const std::byte> own = std::span<const std::byte>(image).subspan(kHeadBytes);
  if (head.bytes != static_cast<std::int64_t>(own.size()) || head.hash != checkpoint_hash(own)) return damaged(path);
  return image;
}

KeepingThread::KeepingThread(Keep keep) : keep_(std::move(keep)), thread_([this] { run(); }) {}

KeepingThread::~KeepingThread() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void KeepingThread::wake() {
  const MutexLock lock(mutex_);
  is_due_ = true;
  changed_.notify_all();
}

absl::Status KeepingThread::failure() const {
  const MutexLock lock(mutex_);
  return failure_;
}

void KeepingThread::run() {
  for (bool is_last = false; !is_last;) {
    {
      const MutexLock lock(mutex_);
      while (!is_due_ && !is_ending_) changed_.wait(mutex_);
      is_due_ = false;
      is_last = is_ending_;
    }
    absl::Status status;
    try {
      status = keep_(is_last);
    } catch (const std::exception& error) {  // there is no memory for a copy
      status = make_error(ExitCode::kOsResource, std::string("parameter server: a shard is not kept: ") + error.what() +
                                                     ". [T1004] hint: give the server more memory");
    }
    if (status.ok()) continue;
    log_error(message_of(status));
    const MutexLock lock(mutex_);
    failure_ = status;
    return;
  }
}

}  // namespace tessera
