#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera::python {

/// The tensors that are lent to a function of a Python program for one call. They lie over memory of the Engine. If the
/// function keeps such tensors, they refuse access after the call, since their memory may then hold other values, or be
/// freed. REQUIRES: the caller holds the GIL.
class Lent {
 public:
  /// `to`: the name of the called function, for the error of a later access, such as "CommHook.sum".
  explicit Lent(std::string to) : to_(std::move(to)) {}
  ~Lent();
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  /// Returns a lent tensor over the memory of `own`, with the shape of `own`.
  at::Tensor over(const at::Tensor& own);
  /// Returns the function's result, for use after the call. If the result is a lent tensor, this returns the Engine's
  /// tensor. If it is a view of a lent tensor, this returns a copy.
  at::Tensor back(const at::Tensor& result) const;
  std::vector<at::Tensor> back(const std::vector<at::Tensor>& results) const;

 private:
  struct Loan {
    at::Tensor own, lent;
  };
  const std::string to_;
  std::vector<Loan> loans_;
};

}  // namespace tessera::python
