#pragma once

namespace tessera {

/// While one lives on a thread, what runs there runs for the second time: checkpoint() computes again what backward needs.
/// What a forward counts (running statistics of a batch norm) is counted already.
class Recomputing {
 public:
  Recomputing() { ++depth_; }
  ~Recomputing() { --depth_; }
  Recomputing(const Recomputing&) = delete;
  Recomputing& operator=(const Recomputing&) = delete;
  static bool now() { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

}  // namespace tessera
