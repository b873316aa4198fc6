#pragma once

#include <ATen/core/Tensor.h>

#include "sharding/unit.h"

namespace tessera {

/// Writes this rank's parts of parameters and masters from `values` [at.numel], which are the elements `at` of the
/// group's flat buffer. `values` is in host memory: masters in fp32 if the group trains, else values of the group's
/// dtype. Every rank passes the same values, so that all copies of a parameter get the same rounded values. Several
/// threads may call it at once for pieces that do not overlap. Throws the errors of for_each_state.
void write_values(FlatGroup& group, const at::Tensor& values, Extent at);

/// Returns the dtype of a group's values in a flat tensor: fp32 for parameters that train, else the group's dtype.
at::ScalarType flat_type_of(const FlatGroup& group);

/// Reads this rank's parts into `flat` [numel of the group's flat buffer]: the optimizer part if the group trains
/// (exact masters), else the parameter part. Other elements of `flat` do not change. Throws the errors of
/// for_each_state.
void read_values(const FlatGroup& group, const at::Tensor& flat);

/// Returns `master` (fp32) as the group's parameters hold it: rounded to their dtype, and widened again.
at::Tensor rounded_master(const at::Tensor& master, const FlatGroup& group);

/// Returns the fp32 masters of a parameter of `dtype` that was frozen and whose values are `held` now. An element of
/// `master` is still the master if it rounds to `held`: to nearest even, or, for bf16, by leaving out the low half
/// (split masters). Otherwise the program has written the value, and the element of `held` is the master. `master` and
/// `held`: fp32, of one shape.
at::Tensor masters_of_frozen(const at::Tensor& master, const at::Tensor& held, DType dtype);

/// Replaces values in `flat` by exact masters, within this rank's optimizer part. `flat` holds gathered values, which
/// are rounded masters; if rounding the master gives the value, the value has not been changed.
void keep_unchanged_masters(const FlatGroup& group, const at::Tensor& flat);

}  // namespace tessera
