#pragma once

#include <ATen/core/Tensor.h>

#include "sharding/unit.h"

namespace tessera {

/// Writes what `values` [at.numel] has of this rank's parts of parameters and masters: elements `at` of the group's flat
/// buffer, in host memory, fp32 where the group trains (the masters), else of its dtype. The same values on every rank,
/// so that copies of one parameter are rounded alike. From several threads at once for pieces that do not overlap.
void write_values(FlatGroup& group, const at::Tensor& values, Extent at);

/// What `flat` (see write_values) is made of: fp32 for parameters that train, else the group's dtype.
at::ScalarType flat_type_of(const FlatGroup& group);

/// The reverse of write_values: writes this rank's parts into `flat`, the optimizer part where the group trains (exact
/// masters), else the parameter part.
void read_values(const FlatGroup& group, const at::Tensor& flat);

/// `master` (fp32) as the group's parameters hold it: rounded to their dtype, and widened again.
at::Tensor rounded_master(const at::Tensor& master, const FlatGroup& group);

/// The fp32 masters of a parameter that was frozen, elements of `dtype` whose values are `held` now: those of `master` that rounding makes
/// `held` of, to the nearest even or as split masters are rounded. Where nothing explains a value, somebody wrote it, and it is the
/// master. `master`, `held`: fp32, of one shape.
at::Tensor masters_of_frozen(const at::Tensor& master, const at::Tensor& held, DType dtype);

/// `flat` holds gathered values, which are rounded masters. Where rounding explains a value, nobody changed it: its
/// exact master takes the value's place in `flat`, within this rank's optimizer part.
void keep_unchanged_masters(const FlatGroup& group, const at::Tensor& flat);

}  // namespace tessera
