#pragma once

namespace tessera {

/// While one lives, every operator of this process has the units among its inputs gathered before it runs and pinned
/// until it returns: demand gather. That is what lets any module run sharded, unmodified: `forward` may be called from
/// anywhere, weights may be tied, indexed, stacked or passed to functions; backward and recomputation are operators
/// too.
///
/// It is an at::RecordFunction callback. It looks at tensors, lists and tuples among the inputs, and tells a unit by
/// the deleter of its storage's data pointer, so an operator without units costs a few comparisons, and threads that
/// run other ranks or no rank at all share nothing.
///
/// Operators that only return views, by their schemas, gather nothing; a view's storage is the parameter's, so the operator that uses the
/// view gathers. What bypasses operators (data_ptr, numpy, DLPack, accessors) is refused by the storage unless the unit is pinned
/// (Unit::watch).
///
/// A callback must not throw: a failed gather poisons the unit (Residency::use_or_poison), and the operator itself
/// throws.
class OpWatch {
 public:
  OpWatch();
  ~OpWatch();
  OpWatch(const OpWatch&) = delete;
  OpWatch& operator=(const OpWatch&) = delete;
};

}  // namespace tessera
