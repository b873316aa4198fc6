#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "runtime/comm/call.h"

namespace tessera {

/// A CallSignature that may be read while it is written, word by word. A reader gets the last known state of a missing
/// rank. If it reads at the wrong moment, it gets at worst a mixture of two calls.
class PublishedCall {
 public:
  void store(const CallSignature& call) {
    std::array<std::uint64_t, kWords> words;
    std::memcpy(words.data(), &call, sizeof call);
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
  }
  CallSignature load() const {
    std::array<std::uint64_t, kWords> words;
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    CallSignature call;
    std::memcpy(static_cast<void*>(&call), words.data(), sizeof call);
    call.label.back() = 0;
    return call;
  }

 private:
  static constexpr std::size_t kWords = sizeof(CallSignature) / sizeof(std::uint64_t);
  std::array<std::atomic<std::uint64_t>, kWords> words_;
};

}  // namespace tessera
