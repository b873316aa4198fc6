#pragma once

// See docs/glossary.md: residency, unit.

namespace tessera {

/// Gathers on demand: while an OpWatch lives, the units among an operator's inputs are gathered before the operator
/// runs, and are pinned until it returns. So any module can run sharded, without changes. `forward` may be called from
/// anywhere, and weights may be tied, indexed, stacked or passed to functions. Backward and recomputation consist of
/// operators too.
///
/// OpWatch is an at::RecordFunction callback, which is called on the thread that runs the operator. It looks at
/// tensors, lists and tuples among the inputs, and recognises a unit by the deleter of its storage's data pointer. An
/// operator without units therefore costs a few comparisons, and threads that run other ranks or no rank at all share
/// nothing.
///
/// Nothing is gathered for operators that only return views (their schemas say so). A view has the storage of the
/// parameter, so the unit is gathered for the operator that uses the view. The storage refuses reads that bypass
/// operators (data_ptr, numpy, DLPack, accessors), unless the unit is pinned (Unit::watch).
///
/// A callback must not throw. So a failed gather poisons the unit (Residency::use_or_poison), and the operator itself
/// throws.
class OpWatch {
 public:
  OpWatch();
  ~OpWatch();
  OpWatch(const OpWatch&) = delete;
  OpWatch& operator=(const OpWatch&) = delete;
};

/// Makes sure that DataWait::parameter_is_read is called before the next operator on this thread that reads a
/// parameter, and returns true. A living OpWatch calls parameter_is_read anyway. If no OpWatch lives and `looks` is
/// true, this function watches the thread's operators until then, which costs some allocations of LibTorch. If no
/// OpWatch lives and `looks` is false, the function does nothing and returns false.
bool watch_for_first_read(bool looks);
/// Ends the watch for a first read, if there is one.
void forget_first_read();

}  // namespace tessera
