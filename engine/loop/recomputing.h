#pragma once

namespace tessera {

/// One lives on a thread while checkpoint() runs a forward on that thread for the second time, because backward needs
/// the forward's tensors. Modules that count something in forward (running statistics of a batch norm) ask `now` and do
/// not count it again.
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
