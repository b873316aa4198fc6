#include "runtime/comm/c10d/run_rounds.h"

#include <algorithm>
#include <array>

#include "runtime/comm/sum/pairwise_sum.h"

namespace tessera {
namespace {

constexpr std::size_t kWidened = 1024;  // number of elements of `wide`, which stays in the first-level cache

/// The elements of one message.
struct Part {
  std::size_t begin, numel;
};

Part part_of(const SliceMessage& message, const RoundBuffers& buffers) {
  const std::size_t begin = buffers.begins[message.first];
  return {begin, buffers.begins[message.first + message.count] - begin};
}

std::size_t bytes_of(const SliceMessage& message, const RoundBuffers& buffers) {
  return part_of(message, buffers).numel *
         size_of(message.is_contribution ? buffers.input_dtype : buffers.result_dtype);
}

void add(const std::byte* own, const std::byte* received, bool is_received_left, DType dtype, float* sums,
         std::size_t numel) {
  std::array<const void*, 2> sources = {own, received};
  if (is_received_left) std::swap(sources[0], sources[1]);
  pairwise_sum(sources, dtype, sums, numel);
}

/// Adds a contribution to sums of another dtype.
void add_widened(float* sums, const std::byte* received, bool is_received_left, DType dtype, std::size_t numel) {
  std::array<float, kWidened> wide;
  for (std::size_t begin = 0; begin < numel; begin += kWidened) {
    const std::size_t length = std::min(kWidened, numel - begin);
    const std::array<const void*, 1> narrow = {received + begin * size_of(dtype)};
    pairwise_sum(narrow, dtype, wide.data(), length);
    float* const own = sums + begin;
    add(reinterpret_cast<const std::byte*>(own), reinterpret_cast<const std::byte*>(wide.data()), is_received_left,
        DType::kF32, own, length);
  }
}

}  // namespace

std::size_t received_bytes(const Rounds& rounds, const RoundBuffers& buffers) {
  std::size_t most = 0;
  for (const Round& round : rounds) {
    if (!round.adds) continue;
    for (const SliceMessage& message : round.receives) most = std::max(most, bytes_of(message, buffers));
  }
  return most;
}

void run_rounds(c10d::Backend& backend, Transfers& transfers, int tag, const Rounds& rounds,
                const RoundBuffers& buffers) {
  const std::size_t element = size_of(buffers.result_dtype);
  bool has_sums = false;
  for (const Round& round : rounds) {
    for (const SliceMessage& message : round.receives) {
      std::byte* const place = buffers.results + part_of(message, buffers).begin * element;
      transfers.receive(backend, tag, message.peer, round.adds ? buffers.received : place, bytes_of(message, buffers));
    }
    for (const SliceMessage& message : round.sends) {
      const std::size_t begin = part_of(message, buffers).begin;
      const std::byte* const from = message.is_contribution ? buffers.input + begin * size_of(buffers.input_dtype)
                                                            : buffers.results + begin * element;
      transfers.send(backend, tag, message.peer, from, bytes_of(message, buffers));
    }
    transfers.wait();
    if (!round.adds) continue;
    const SliceMessage& message = round.receives.front();
    const auto [begin, numel] = part_of(message, buffers);
    const bool is_received_left = message.peer < backend.getRank();
    float* const sums = reinterpret_cast<float*>(buffers.results) + begin;
    if (!has_sums) {
      const std::byte* const own = buffers.input + begin * size_of(buffers.input_dtype);
      add(own, buffers.received, is_received_left, buffers.input_dtype, sums, numel);
    } else if (!message.is_contribution || buffers.input_dtype == DType::kF32) {
      add(reinterpret_cast<const std::byte*>(sums), buffers.received, is_received_left, DType::kF32, sums, numel);
    } else {
      add_widened(sums, buffers.received, is_received_left, buffers.input_dtype, numel);
    }
    has_sums = true;
  }
}

}  // namespace tessera
