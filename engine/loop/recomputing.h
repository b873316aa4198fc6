#pragma once

namespace tessera {

/// A Recomputing object lives on a thread while checkpoint() runs a forward there for the second time, because backward
/// needs the forward's tensors. Modules that count something in forward (such as running statistics of a batch norm)
/// call `now`, and do not count again if it returns true.
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
