#include "sharding/arena.h"

#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "runtime/base/bytes.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

[[noreturn]] void throw_out_of_memory(const std::string& name, std::int64_t bytes, int error) {
  throw Error(ExitCode::kOsResource, "cannot allocate " + format_bytes(bytes) + " for " + name + ": " +
                                         std::strerror(error) +
                                         ". [T0613] hint: see `tessera plan` for what needs how much");
}

/// Calls `allocate()`. Throws an error that names the block if this process does not have that much memory.
template <class Allocate>
auto allocated(const std::string& name, std::int64_t bytes, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::bad_alloc&) {
    throw_out_of_memory(name, bytes, ENOMEM);
  }
}

}  // namespace

Arena Arena::plain(std::string name, std::int64_t bytes, c10::Device device) {
  Arena arena;
  arena.name_ = std::move(name);
  arena.bytes_ = bytes;
  if (bytes == 0) return arena;
  return device.is_cpu() ? mapped(std::move(arena)) : on_device(std::move(arena), device);
}

Arena Arena::given(std::string name, std::int64_t bytes, std::shared_ptr<std::byte> memory) {
  Arena arena;
  arena.name_ = std::move(name);
  arena.bytes_ = bytes;
  arena.memory_ = std::move(memory);
  return arena;
}

Arena Arena::mapped(Arena arena) {
  const std::int64_t bytes = arena.bytes_;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_out_of_memory(arena.name_, bytes, errno);
  madvise(memory, bytes, MADV_HUGEPAGE);  // an error does no harm, since the pages are then only smaller
  arena.memory_ = {static_cast<std::byte*>(memory), [bytes](std::byte* p) { munmap(p, bytes); }};
  return arena;
}

Arena Arena::on_device(Arena arena, c10::Device device) {
  auto tensor =
      std::make_shared<at::Tensor>(at::zeros({arena.bytes_}, at::TensorOptions().dtype(at::kByte).device(device)));
  auto* const data = static_cast<std::byte*>(tensor->data_ptr());
  arena.memory_ = {std::move(tensor), data};
  return arena;
}

Arena Arena::shared(std::string name, std::int64_t bytes, Collectives& group) {
  if (bytes == 0) return plain(std::move(name), 0);
  return over(name, bytes, allocated(name, bytes, [&] { return group.allocate(bytes); }));
}

Arena Arena::common(std::string name, std::int64_t bytes, Collectives& group) {
  if (bytes == 0) return plain(std::move(name), 0);
  return over(name, bytes, allocated(name, bytes, [&] { return group.allocate_common(bytes); }));
}

Arena Arena::part_of_common(std::string name, std::int64_t bytes, Collectives& group) {
  Arena arena = common(std::move(name), bytes * group.size(), group);
  arena.bytes_ = bytes;
  std::byte* const own = arena.memory_.get() + group.rank() * bytes;
  arena.memory_ = {std::move(arena.memory_), own};
  return arena;
}

Arena Arena::over(std::string name, std::int64_t bytes, absl::StatusOr<std::unique_ptr<CommBuffer>> allocated) {
  Arena arena;
  arena.name_ = std::move(name);
  arena.bytes_ = bytes;
  std::shared_ptr<CommBuffer> buffer = value_or_throw(std::move(allocated));
  std::byte* data = buffer->data();
  arena.memory_ = {std::move(buffer), data};
  return arena;
}

std::byte* Arena::take(std::int64_t bytes) {
  TORCH_INTERNAL_ASSERT(taken_ + bytes <= bytes_, name_, ": ", taken_, " + ", bytes, " bytes exceed the plan's ",
                        bytes_);
  std::byte* piece = memory_.get() + taken_;
  taken_ += bytes;
  return piece;
}

void Arena::expect_full() const {
  TORCH_INTERNAL_ASSERT(taken_ == bytes_, name_, ": ", taken_, " bytes used, ", bytes_, " planned");
}

}  // namespace tessera
